"""Inputs that depend on one another, by memory or by autograd's history, are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gt_trace import CaptureError, InputMismatchError, StateMismatchError, trace_step


def counted(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.add_(1)
    return module.linear(x).sum() + module.seen.sum()


@pytest.fixture
def model() -> nn.Module:
    module = nn.Module()
    module.linear = nn.Linear(4, 4)
    module.register_buffer("seen", torch.zeros(2, 4))
    return module


def test_an_argument_in_the_memory_of_a_buffer_that_is_written_is_refused(model: nn.Module):
    trace = trace_step(lambda x: counted(model, x), module=model)
    run = trace(torch.ones(2, 4)).bind(model)
    run(torch.ones(2, 4))
    expected = r"seen and x share memory, and the step writes seen; pass or register a \.clone\(\)"
    with pytest.raises(InputMismatchError, match=expected):
        run(model.seen.view(2, 4))
    with pytest.raises(CaptureError, match=expected):
        trace(model.seen.view(2, 4))
    run(model.linear.weight.detach()[:2])  # only read


def test_arguments_in_one_memory_are_refused_if_one_is_written():
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    run = trace_step(step)(torch.ones(3), torch.ones(3)).bind()
    both = torch.ones(6)
    assert torch.equal(run(both[:3], both[3:]), torch.full((3,), 2.0))  # no element in common
    with pytest.raises(InputMismatchError, match="x and y share memory, and the step writes x"):
        run(both[:3], both[2:5])
    same = torch.ones(3)
    with pytest.raises(CaptureError, match="x and y share memory, and the step writes x"):
        trace_step(step)(same, same)
    reading = trace_step(lambda x, y: x * y)(torch.ones(3), torch.ones(3)).bind()
    assert torch.equal(reading(both[:3], both[:3]), both[:3] * both[:3])


def test_state_in_the_memory_of_other_state_is_refused_if_one_is_written(model: nn.Module):
    traced = trace_step(lambda x: counted(model, x), module=model)(torch.ones(2, 4))
    model.linear.weight.data = model.seen.expand(2, 4).repeat(2, 1)
    traced.bind(model)
    whole = torch.zeros(4, 4)
    model.linear.weight.data, model.seen = whole, whole[1:3]
    with pytest.raises(StateMismatchError, match=r"linear\.weight and seen share memory"):
        traced.bind(model)


def test_arguments_whose_gradient_is_part_of_another_are_refused():
    linear = nn.Linear(4, 4)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear(x).mul(y).sum(), [x, y, linear.weight])

    trace = trace_step(step, module=linear)
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    run = trace(x, y).bind(linear)
    for found, wanted in zip(run(x, y), step(x, y), strict=True):
        assert torch.equal(found, wanted)
    for given, problem in (
        ((x, x), r"y is the same tensor as x; pass \.detach\(\)\.requires_grad_\(\)"),
        ((x, x * 2), r"y was computed from x, outside of the step; compute it inside, or pass"),
        ((linear.weight, y), "x is the same tensor as weight"),
        ((x, linear.weight.sin()), "y was computed from weight"),
    ):
        with pytest.raises(InputMismatchError, match=problem):
            run(*given)
        with pytest.raises(CaptureError, match=problem):
            trace(*given)
    run(x * 2, y * 2)  # of something else


def test_an_argument_that_requires_a_gradient_or_does_not_is_as_captured():
    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x)[0]

    run = trace_step(step)(torch.ones(2, requires_grad=True)).bind()
    with pytest.raises(InputMismatchError, match=r"x: requires no gradient, captured with one; pa"):
        run(torch.ones(2))
    run = trace_step(lambda x: x * 2)(torch.ones(2)).bind()
    with pytest.raises(InputMismatchError, match=r"x: requires a gradient, captured without one;"):
        run(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        run = trace_step(lambda x: x * 2)(torch.ones(2)).bind()
        run(torch.ones(2, requires_grad=True))


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_that_a_graph_of_plain_ones_does_not_stand_for_are_refused():
    run = trace_step(lambda x: x * 2)(torch.ones(2)).bind()
    run(nn.Parameter(torch.ones(2), requires_grad=False))
    dense = torch.ones(2, 2)
    for given, problem in (
        (
            torch.ones(2).as_subclass(Tagged),
            r"a Tagged, whose own behavior the graph would lose; pass",
        ),
        (dense.to_sparse(), "of layout torch.sparse_coo; pass its dense parts"),
        (dense.to_sparse_csr(), "of layout torch.sparse_csr"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "a nested tensor; pass its dense parts",
        ),
        (
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"a quantized tensor; pass \.int_repr\(\)",
        ),
    ):
        with pytest.raises(CaptureError, match=problem):
            trace_step(lambda x: x + x)(given)
        with pytest.raises(InputMismatchError, match="x: "):
            run(given)
    with pytest.raises(
        InputMismatchError, match=r"x: on meta, captured on cpu; pass \.to\('cpu'\)"
    ):
        run(torch.ones(2, device="meta"))


@pytest.mark.parametrize("value", [float("nan"), complex(1, float("nan")), -0.0, True, None, "a"])
def test_a_constant_equals_itself_and_nothing_else(value: object):
    run = trace_step(lambda x, constant: x * 2)(torch.ones(2), value).bind()
    run(torch.ones(2), value if value != value else type(value)(value) if value else value)
    others = {-0.0: 0.0, True: 1, None: torch.ones(1), "a": "b"}
    with pytest.raises(InputMismatchError, match=r"constant: .*, captured with the constant"):
        run(torch.ones(2), others.get(value, 1.0))
