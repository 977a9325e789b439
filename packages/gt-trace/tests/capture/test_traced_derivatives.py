"""Gradients that PyTorch computes otherwise while it is traced are those of eager, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from gt_trace import trace_step
from gt_trace.errors import CaptureError
from gt_trace.joint import export_joint_graph, partition

_REFUSAL = (
    r"(?s)the step differentiates torch.prod or torch.cumprod, whose gradient this PyTorch "
    r"computes by another formula while it is traced, with other last bits\. Multiply the "
    r"elements one by one .* or add logarithms of positive ones:\n  return product\(x\)"
)


def _gradient(product):
    def scaled(x):
        return product(x)

    def step(x):
        x = x.detach().requires_grad_()
        value = scaled(x)
        weights = torch.linspace(0.3, 1.7, value.numel()).view(value.shape)
        return value.detach(), torch.autograd.grad((value * weights).sum(), x)[0]

    return step


@pytest.mark.parametrize(
    "product",
    [
        torch.prod,
        lambda x: x.prod(1),
        lambda x: torch.prod(x, 0, keepdim=True),
        lambda x: torch.masked.prod(x, 1, mask=x > 0),
        lambda x: x.exp().prod(-1).log(),
    ],
)
def test_refuses_the_gradient_of_a_product(product):
    with pytest.raises(CaptureError, match="the step differentiates torch"):
        trace_step(_gradient(product))(torch.randn(5, 7))


def test_the_refusal_names_the_line_and_says_what_to_do():
    with pytest.raises(CaptureError, match=_REFUSAL):
        trace_step(_gradient(torch.prod))(torch.randn(5, 7))


def test_a_joint_graph_refuses_it_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 7))

        def forward(self, x):
            return (self.weight * x).prod(1)

    with pytest.raises(CaptureError, match="the step differentiates torch"):
        export_joint_graph(Model(), (torch.randn(5, 7),))


@pytest.mark.parametrize(
    "product",
    [
        lambda x: x[:, 0] * x[:, 1] * x[:, 2],
        lambda x: x.abs().log().sum(1).exp(),
        lambda x: x * x.detach().prod(1, keepdim=True),
        lambda x: x * torch.prod(x.sign().long(), 1, keepdim=True),
        lambda x: x.sum().prod(),
    ],
)
def test_products_that_are_not_differentiated_by_it_are_captured(product):
    torch.manual_seed(0)
    x, step = torch.randn(5, 7), _gradient(product)
    for got, want in zip(trace_step(step)(x).bind()(x), step(x), strict=True):
        assert torch.equal(got, want)


def test_cumprod_has_the_gradient_of_eager_or_is_refused():
    x, step = torch.randn(5, 7), _gradient(lambda x: x.cumprod(1))
    try:
        captured = trace_step(step)(x).bind()
    except CaptureError:  # as that of prod, in versions that trace products
        with pytest.raises(CaptureError, match="the step differentiates torch"):
            trace_step(step)(x)
    else:
        assert all(map(torch.equal, captured(x), step(x)))


def _twice(function):
    def step(x, value):
        x, value = (each.detach().requires_grad_() for each in (x, value))
        result = function(x, value).square()
        first = torch.autograd.grad(_weighted(result), (x, value), create_graph=True)
        loss = _weighted(first[0]) + _weighted(first[1])
        return loss.detach(), *torch.autograd.grad(loss, (x, value))

    return step


@pytest.mark.parametrize(
    "function",
    [
        lambda x, value: x.max() * value,
        lambda x, value: x.masked_fill(x > 0.5, value),
    ],
)
def test_refuses_second_derivatives_that_are_traced_otherwise(function):
    message = r"differentiates a gradient \(create_graph=True\) .* Use amax, amin or torch.where:\n"
    with pytest.raises(CaptureError, match=message):
        trace_step(_twice(function))(torch.randn(5, 7), torch.tensor(0.3))


def test_refuses_the_second_derivative_of_cumprod():
    with pytest.raises(CaptureError, match="the step differentiates torch"):
        trace_step(_twice(lambda x, value: x.cumprod(1) * value))(
            torch.randn(5, 7), torch.tensor(0.3)
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, value: x.amax() * value,
        lambda x, value: torch.where(x > 0.5, value, x),
        lambda x, value: torch.maximum(x.t().square(), value),
    ],
)
def test_other_second_derivatives_are_those_of_eager(function):
    torch.manual_seed(0)
    step, given = _twice(function), (torch.randn(50, 70), torch.tensor(0.3))
    _check_bits(trace_step(step)(*given).bind()(*given), step(*given))


_BROADCAST = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "atan2": torch.atan2,
    "clamp": lambda x, bound: x.clamp(bound, bound + 1),
    "clamp_min": lambda x, bound: x.clamp(min=bound),
    "clamp_max": lambda x, bound: x.clamp(max=bound),
}
_OF_ALL = {
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "infinite": lambda x: (x.max() - x.max().detach()).sqrt(),
}


class _Operator(nn.Module):
    """An operator whose first operand is transposed, and scaled by a parameter."""

    def __init__(self, operator, bound):
        super().__init__()
        self.operator, self.scale = operator, nn.Parameter(torch.tensor(1.5))
        self.bound = nn.Parameter(bound)

    def forward(self, x):
        x = x.transpose(0, -1) * self.scale
        return self.operator(x, self.bound), x


def _check_bits(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(*(each.detach().reshape(-1).view(torch.int32) for each in (one, other)))


def _weighted(value):
    return (value * torch.linspace(-0.7, 1.7, value.numel()).view(value.shape)).sum()


def _check_step_and_joint(operator, bound):
    torch.manual_seed(0)
    model, x = _Operator(operator, bound), torch.randn(37, 9, 41)

    def step(run, x):
        value, scaled = run(x)
        tensors = (scaled, *model.parameters())
        used = torch.autograd.grad(_weighted(value), tensors, allow_unused=True)
        return value.detach(), *(each for each in used if each is not None)

    want = step(model, x)
    captured = trace_step(lambda x: step(model, x), module=model)(x).bind(model)
    _check_bits(captured(x), want)

    def summed(run, x):
        parameters = list(model.parameters())
        used = torch.autograd.grad(_weighted(run(x)[0]), parameters, allow_unused=True)
        return [each for each in used if each is not None]

    joint = partition(export_joint_graph(model, (x,))).bind(model)
    _check_bits(summed(joint, x), summed(model, x))


@pytest.mark.parametrize("operator", _BROADCAST.values(), ids=_BROADCAST)
def test_sums_over_a_broadcast_operand_add_in_the_order_of_eager(operator):
    _check_step_and_joint(operator, torch.randn(9, 37))


@pytest.mark.parametrize("operator", _OF_ALL.values(), ids=_OF_ALL)
def test_elements_beside_the_greatest_have_gradients_of_positive_zero(operator):
    _check_step_and_joint(lambda x, _: -operator(x).view(1), torch.randn(()))


def test_the_gradient_of_a_fill_value_sums_the_filled_elements_alone():
    def filled(x, value):
        return x.masked_fill(x[0] > 0, value)

    _check_step_and_joint(filled, torch.randn(()))


def test_the_gradient_of_a_subclass_is_that_of_its_own_formula():
    def step(x):
        return torch.autograd.grad(-x.max(), x)[0]

    x = TwoTensor(torch.randn(5, 7), torch.randn(5, 7)).requires_grad_()
    got, want = trace_step(step)(x).bind()(x), step(x)
    _check_bits((got.a, got.b), (want.a, want.b))


def test_a_checkpointed_maximum_has_the_gradient_of_eager():
    def bounded(x, bound):
        return checkpoint(torch.maximum, x, bound, use_reentrant=False)

    _check_step_and_joint(bounded, torch.randn(9, 37))
