"""Nodes of equal calls are copied, and the graph is the traced one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gt_config.node_keys import ModuleAnnotation
from gt_trace import annotate, calls_of_one_place, trace_step, traced_call
from gt_trace.capture.copied_calls import copied_calls
from gt_trace.stamping import CopyReport, makes_traced_calls, trace_step_by_copying
from gt_trace.stamping.report import StampingError

aten = torch.ops.aten
Call = tuple[Hashable | None, Callable[..., Any]]


class Program(nn.Module):
    """Runs ``call`` on a state and a weight, once a layer, as one autograd function."""

    makes_traced_calls = True

    def __init__(self, call: Call, num_layers: int = 4) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4, 4)) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Run.apply(self.call, x, *self.weights)
        return result


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*weights)
        with calls_of_one_place():
            for index, weight in enumerate(weights):
                with annotate(ModuleAnnotation(fqn=f"layers.{index}")):
                    (x,) = _called(call, (x, weight))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = []
        with calls_of_one_place():
            for weight in reversed(ctx.saved_tensors):
                (gradient,) = _called(ctx.call, (gradient, weight))
                found.append(gradient)
        return None, gradient, *reversed(found)


def _called(call: Call, operands: Sequence[Tensor]) -> Sequence[Any]:
    key, function = call
    return traced_call(key, lambda given: function(*given), operands)


def step_of(model: nn.Module) -> Callable[[Tensor], Any]:
    return lambda x: torch.autograd.grad(model(x).sum(), list(model.parameters()))


def report_of(*call: Any) -> CopyReport:
    """Of a capture that equals the full one."""
    model = Program(call)
    trace = trace_step_by_copying(step_of(model), module=model, compare=True)
    return trace(torch.ones(4, 4)).report


def product(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (aten.mm.default(x, weight),)


@pytest.mark.parametrize(
    "function",
    [
        product,
        lambda x, weight: (x,),
        lambda x, weight: (x.t().reshape(16).view(4, 4),),
        lambda x, weight: (aten.add.Tensor(x.chunk(2, dim=1)[1], weight[:, 2:]).repeat(1, 2),),
        lambda x, weight: (aten.native_layer_norm.default(x, [4], weight[0], None, 1e-5)[0],),
    ],
)
def test_equal_calls_are_copied_and_the_graph_is_the_traced_one(function: Any) -> None:
    report = report_of("a call", function)
    # The state is contiguous from the first call on, or transposed by turns: two kinds at most.
    assert report.num_calls == 8
    assert report.num_copied >= 4
    assert str(report).endswith("calls traced, the others copied, equal to the full trace")


@pytest.mark.parametrize(
    ("key", "function"),
    [
        (None, product),
        ("random", lambda x, weight: (torch.rand_like(x) * weight,)),
        ("writes", lambda x, weight: (x.clone().add_(weight),)),
        ("at run time", lambda x, weight: (x.nonzero()[:, :1].to(x.dtype).sum() * weight,)),
    ],
)
def test_other_calls_are_traced(key: str | None, function: Any) -> None:
    model = Program((key, function))
    with copied_calls() as counts:
        trace_step(model, module=model)(torch.ones(4, 4))
    assert (counts.num_calls, counts.num_copied) == (4, 0)


def test_a_call_that_reads_more_than_its_operands_is_traced() -> None:
    model = Program(("a call", lambda x, weight: (x * model.weights[3],)))
    with copied_calls() as counts:
        trace_step(model, module=model)(torch.ones(4, 4))
    assert (counts.num_calls, counts.num_copied) == (4, 0)


Operands = Callable[[Tensor], tuple[Tensor, ...]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lambda x: (x, x.sin()), lambda x: (x.double(), x.sin()), id="dtype"),
        pytest.param(lambda x: (x, x.sin()), lambda x: (x.sin(), x.cos().t()), id="strides"),
        pytest.param(lambda x: (x, x.sin()), lambda x: (x.sin()[:1], x), id="shape"),
        pytest.param(lambda x: (x[0], x.sin()), lambda x: (x[1], x.sin()), id="storage offset"),
        pytest.param(lambda x: (x.sin(), x), lambda x: (x, x), id="one value twice"),
        pytest.param(lambda x: (x.sin(), x), lambda x: (x.view(4, 4), x), id="one storage twice"),
    ],
)
def test_operands_that_differ_make_other_calls(one: Operands, other: Operands) -> None:
    def combined(given: Sequence[Tensor]) -> tuple[Tensor]:
        first, second = given
        # Contiguous or not is another operator, and what a memory format means.
        return ((first + 2 * second.contiguous()).reshape(-1).sum() * first,)

    def function(x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        with torch.no_grad(), calls_of_one_place():
            for operands in (one, other, one, other):
                found += traced_call("a call", combined, operands(x))
        return found

    with copied_calls() as counts:
        step = trace_step(function)(torch.zeros(4, 4))
    assert (counts.num_calls, counts.num_copied) == (4, 2)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(step.graph_module(x), function(x), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_key_that_says_too_little_is_noticed_by_the_comparison() -> None:
    calls = np.zeros(1 << 18)  # more than a capture compares

    def alternating(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        calls[0] += 1
        return (x * weight if calls[0] % 2 else x + weight,)

    with pytest.raises(StampingError) as caught:
        report_of("not all of it", alternating)
    first, *lines = str(caught.value).splitlines()
    assert first == "the capture with copied calls differs from the full one:"
    assert any(line.startswith("  operators (") for line in lines)


class _RunWithInnerBackward(torch.autograd.Function):
    """Its backward makes equal calls before and after it runs another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        with calls_of_one_place():
            for _ in range(3):
                (gradient,) = _called(("a call", product), (gradient, weight))
                with torch.enable_grad():
                    leaf = gradient.detach().requires_grad_()
                    used_twice = leaf.sin() * leaf
                (gradient,) = torch.autograd.grad(used_twice, leaf, gradient)
                (gradient,) = _called(("a call", product), (gradient, weight))
        return gradient, gradient


def test_calls_after_an_inner_backward_are_as_traced() -> None:
    model = nn.Linear(4, 4, bias=False)

    def step(x: Tensor) -> Any:
        found: Tensor = _RunWithInnerBackward.apply(x, model.weight)
        return torch.autograd.grad(found.sum(), [model.weight])

    report = trace_step_by_copying(step, module=model, compare=True)(torch.ones(4, 4)).report
    assert report.num_calls == 6
    assert report.num_copied >= 3


def test_only_what_says_so_makes_traced_calls() -> None:
    model = nn.Linear(2, 2)
    assert not makes_traced_calls(None)
    assert not makes_traced_calls(model)
    object.__setattr__(model, "forward", Program(("a call", product)))
    assert makes_traced_calls(model)
