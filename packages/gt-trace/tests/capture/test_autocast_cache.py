"""A weight that is used twice under autocast is cast as often as in eager, or the capture is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gt_trace import CaptureError, InputMismatchError, StateMismatchError, trace_step
from gt_trace.joint import export_joint_graph, partition


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def twice(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        return linear(linear(x))


def twice_with_cache(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast(cache_enabled=True):
        return linear(linear(x))


def twice_without_cache(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast(cache_enabled=False):
        return linear(linear(x))


def in_two_regions(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        x = linear(x)
    with autocast():
        return linear(x)


def in_nested_regions(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        x = linear(x)
        with autocast(cache_enabled=False):
            x = linear(linear(x))
        with autocast(enabled=False):
            x = linear(x.float())
        return linear(x)


def without_gradient_first(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        with torch.no_grad():
            target = linear(x)
        return linear(linear(x)) - target


def of_a_checkpoint(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        return linear(checkpoint(linear, x, use_reentrant=False))


def with_the_cache_cleared(linear: nn.Module, x: Tensor) -> Tensor:
    with autocast():
        x = linear(x)
        torch.clear_autocast_cache()
        return linear(x)


EXACT_IN_JOINT_GRAPHS = (twice_without_cache, in_two_regions, with_the_cache_cleared)
USES = (
    *EXACT_IN_JOINT_GRAPHS,
    twice,
    twice_with_cache,
    in_nested_regions,
    without_gradient_first,
    of_a_checkpoint,
)


class Model(nn.Module):
    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear, x).float()


def step_of(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    return step


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("use", USES, ids=lambda each: each.__name__)
def test_gradients_of_a_step_are_added_in_the_precision_of_eager(use):
    torch.manual_seed(0)
    model, x = Model(use), torch.randn(5, 8)
    step = step_of(model)
    captured = trace_step(step, module=model)(x).bind(model)
    assert torch.is_autocast_cache_enabled()
    assert equal(captured(x), step(x))


@pytest.mark.parametrize("options", [{}, {"cache_enabled": False}], ids=["cache", "no_cache"])
def test_so_are_those_of_a_step_inside_of_autocast(options):
    torch.manual_seed(0)
    model, x = Model(lambda linear, x: linear(linear(x))), torch.randn(5, 8)
    step = step_of(model)
    with autocast(**options):
        traced = trace_step(step, module=model)(x)
        expected = step(x)
    captured = traced.bind(model)
    with autocast(**options):
        assert equal(captured(x), expected)
        assert equal(captured(x), expected)


def test_a_parameter_that_changes_inside_of_a_surrounding_region_is_refused():
    model, x = Model(lambda linear, x: linear(x)), torch.randn(5, 8)
    with autocast():
        captured = trace_step(step_of(model), module=model)(x).bind(model)
        captured(x)
        with torch.no_grad():
            model.linear.weight.mul_(2)
        with pytest.raises(StateMismatchError, match="casts of their former values; enter autoc"):
            captured(x)
    with autocast():
        captured(x)


def test_another_use_of_the_cache_is_refused():
    model, x = Model(twice), torch.randn(5, 8)
    captured = trace_step(step_of(model), module=model)(x).bind(model)
    torch.set_autocast_cache_enabled(False)
    try:
        with pytest.raises(StateMismatchError, match="autocast's cache is off, and was on"):
            captured(x)
    finally:
        torch.set_autocast_cache_enabled(True)


@pytest.mark.parametrize("use", EXACT_IN_JOINT_GRAPHS, ids=lambda each: each.__name__)
def test_joint_graphs_cast_as_eager_does(use):
    torch.manual_seed(0)
    model, x = Model(use), torch.randn(5, 8)
    joint = partition(export_joint_graph(model, (x,))).bind(model)
    found = torch.autograd.grad(joint(x).square().mean(), list(model.parameters()))
    assert equal(found, step_of(model)(x)[1:])


@pytest.mark.parametrize("use", [twice, in_nested_regions, of_a_checkpoint])
def test_or_refuse_what_they_would_cast_more_often(use):
    with pytest.raises(
        CaptureError, match=r"in one region of autocast(.|\n)*cast \d times"
    ) as error:
        export_joint_graph(Model(use), (torch.randn(5, 8),))
    assert "parameter linear.weight is cast" in str(error.value)


def test_an_argument_of_a_joint_graph_that_is_cast_twice_may_be_no_leaf():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with autocast():
                return self.first(x) + self.second(x)

    torch.manual_seed(0)
    model, x = Two(), torch.randn(5, 8, requires_grad=True)
    joint = partition(export_joint_graph(model, (x,))).bind(model)
    found, expected = [torch.autograd.grad(each(x * 2).sum(), x) for each in (joint, model)]
    assert equal(found, expected)
    with pytest.raises(InputMismatchError, match=r"pass what is no leaf of autograd:\n  x"):
        joint(x)
    with torch.no_grad():
        joint(x)
