"""A gradient that PyTorch computes by another formula while it is traced is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gt_trace import trace_step
from gt_trace.errors import CaptureError
from gt_trace.joint import export_joint_graph

_REFUSAL = (
    r"(?s)the step differentiates torch.prod, whose gradient PyTorch computes by another formula "
    r"while it is traced, with other last bits\. Multiply the elements one by one .* or take the "
    r"last of torch.cumprod:\n  return product\(x\)"
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
        lambda x: x.cumprod(1)[:, -1],
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
