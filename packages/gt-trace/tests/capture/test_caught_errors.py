"""What a step may not do because its capture has other tensors, and no values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gt_trace import CaptureError, InputMismatchError, StateMismatchError, trace_step


def is_large(y: Tensor) -> bool:
    try:
        return bool(y.abs().max() > 1e4)
    except RuntimeError:
        return True


def number_of(y: Tensor) -> float:
    with contextlib.suppress(Exception):
        return float(y.sum())
    return 1.0


def is_equal(y: Tensor) -> bool:
    try:
        return torch.equal(y, torch.zeros_like(y))
    except RuntimeError:
        return True


def address(y: Tensor) -> int:
    try:
        return y.data_ptr()
    except Exception:  # noqa: BLE001 - the refusal of the capture is none of PyTorch's errors
        return 0


@pytest.mark.parametrize("decides", [is_large, number_of, is_equal, address])
def test_a_step_that_catches_the_errors_of_its_capture_is_refused(
    decides: Callable[[Tensor], Any],
) -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        y = model(x)
        return y.detach() * (0.0 if decides(y) else 1.0)

    with pytest.raises(CaptureError, match="catches an error that only its capture raises") as told:
        trace_step(step, module=model)(torch.ones(3, 4))
    assert "test_caught_errors.py" in str(told.value)


def test_errors_that_eager_execution_raises_too_may_be_caught() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        try:
            x = x.squeeze("no such dim")  # type: ignore[arg-type]
        except (TypeError, RuntimeError):  # by PyTorch's version
            x = x + 1
        return model(x).detach()

    x = torch.ones(3, 4)
    assert torch.equal(trace_step(step, module=model)(x).bind(model)(x), step(x))


FAILING: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda y: y @ torch.ones(7, 7),
    "cat": lambda y: torch.cat([y, torch.ones(2, 2, 2)]),
    "in place": lambda y: y.detach().add_(torch.ones(9)),
    "split": lambda y: torch.split(y, [9, 9])[0],
    "backward": lambda y: torch.autograd.grad(y, [y])[0],
}


@pytest.mark.parametrize("name", FAILING)
def test_an_operator_that_failed_and_whose_error_is_caught_is_not_in_the_graph(name: str) -> None:
    model, x = nn.Linear(4, 4), torch.ones(3, 4)

    def step(x: Tensor) -> Tensor:
        y = model(x)
        try:
            return FAILING[name](y).detach()  # type: ignore[no-any-return]
        except RuntimeError:
            return y.detach() * 2

    assert torch.equal(trace_step(step, module=model)(x).bind(model)(x), step(x))


def test_labels_out_of_bounds_raise_the_errors_of_eager_execution() -> None:
    def step(labels: Tensor) -> Tensor:
        return nn.functional.one_hot(labels, 4)

    run = trace_step(step)(torch.tensor([0, 3])).bind()
    for labels in ([1, 2], [0, 4], [-1, 0]):
        errors = []
        for each in (step, run):
            try:
                errors.append(str(each(torch.tensor(labels)).tolist()))
            except RuntimeError as error:
                errors.append(str(error).partition("\n")[0])
        assert errors[0] == errors[1]


def test_checks_without_a_result_stay_in_the_graph_if_another_error_is_caught() -> None:
    def step(labels: Tensor) -> Tensor:
        torch._assert_async(labels.lt(4).all(), "labels are large")
        with contextlib.suppress(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        return labels + 1

    run = trace_step(step)(torch.tensor([0, 3])).bind()
    assert run(torch.tensor([1, 3])).tolist() == [2, 4]
    with pytest.raises(RuntimeError, match="labels are large"):
        run(torch.tensor([1, 4]))


def test_caught_errors_of_operators_that_write_lists_are_refused() -> None:
    def step(x: Tensor) -> Tensor:
        sums = [torch.zeros(3), torch.zeros(2)]
        with contextlib.suppress(RuntimeError):  # the first sum is written by then
            torch._foreach_add_(sums, [x, x])
        return sums[0] + x

    with pytest.raises(CaptureError, match=r"catches an error of aten\._foreach_add_.*written"):
        trace_step(step)(torch.ones(3))


@pytest.mark.parametrize("kind", [dict, set, frozenset])
def test_tensors_of_the_module_are_no_keys_from_outside(kind: Callable[..., Any]) -> None:
    model = nn.Linear(4, 4)
    decayed: Any = {model.weight: 1.0} if kind is dict else kind([model.weight])

    def step(x: Tensor) -> Tensor:
        factor = 2.0 if model.weight in decayed else 1.0
        return model(x).detach() * factor

    with pytest.raises(CaptureError, match="in a dictionary or a set that was made outside"):
        trace_step(step, module=model)(torch.ones(3, 4))


def test_keys_that_were_made_inside_or_read_outside_are_found() -> None:
    model = nn.Linear(4, 4)
    held = list(model.parameters())
    rates = {each: float(index) for index, each in enumerate(held, 2)}

    def step(x: Tensor) -> Tensor:
        own = {each: index for index, each in enumerate(model.parameters())}
        factor = sum(rates[each] for each in held) + own[model.bias]
        return model(x).detach() * factor

    x = torch.ones(3, 4)
    assert torch.equal(trace_step(step, module=model)(x).bind(model)(x), step(x))


def test_hooks_of_an_argument_are_refused() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).sum(), [x])

    x = torch.ones(3, 4, requires_grad=True)
    captured = trace_step(step, module=model)(x).bind(model)
    captured(x)
    x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with pytest.raises(InputMismatchError, match="x: has gradient hooks, which a graph does not"):
        captured(x)


def test_a_gradient_from_outside_is_refused_if_the_step_would_add_to_it() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = trace_step(step, module=model, optimizer=optimizer)(torch.ones(3, 4))
    bound = captured.bind(model, optimizer)
    bound(torch.ones(3, 4))
    model.weight.grad = torch.ones(4, 4)
    with pytest.raises(StateMismatchError, match=r"may add to them: weight\. Set \.grad"):
        bound(torch.ones(3, 4))
    model.weight.grad = None
    bound(torch.ones(3, 4))


def test_a_captured_step_can_be_copied() -> None:
    model = nn.Linear(4, 4)
    traced = trace_step(lambda x: model(x).detach(), module=model)(torch.ones(3, 4))
    x = torch.rand(3, 4)
    assert torch.equal(copy.deepcopy(traced).bind(model)(x), model(x))


def test_sizes_that_are_numbers_beside_dynamic_ones() -> None:
    x = torch.rand(3, 4)
    torch._dynamo.mark_dynamic(x, 0)

    def step(x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.t(), (x.shape[0],))

    captured = trace_step(step)(x).bind()
    for rows in (3, 5):
        x = torch.rand(rows, 4)
        assert torch.equal(captured(x), step(x))
