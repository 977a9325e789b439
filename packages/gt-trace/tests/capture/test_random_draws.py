"""A capture refuses to draw in the backward what the forward drew, and only that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gt_trace import CaptureError, phase_of, trace_step
from gt_trace.joint import export_joint_graph


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.drop(self.linear(x)).relu(), x, use_reentrant=False)


MESSAGE = r"the backward draws random numbers again.*\n  bernoulli__\w+ \(aten.bernoulli_.float\)"


def captured(module: nn.Module) -> Any:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = module(x).sum()
        return loss, *torch.autograd.grad(loss, list(module.parameters()))

    return trace_step(step, module=module)(torch.ones(2, 4))


def test_checkpointed_dropout_is_refused_in_a_step():
    with pytest.raises(CaptureError, match=MESSAGE):
        captured(Checkpointed())


def test_a_joint_graph_draws_once_and_keeps_what_was_drawn():
    nodes = export_joint_graph(Checkpointed(), (torch.ones(2, 4),)).graph_module.graph.nodes
    seeded = torch.Tag.nondeterministic_seeded
    assert [phase_of(n) for n in nodes if seeded in getattr(n.target, "tags", ())] == ["forward"]


def test_without_dropout_and_without_checkpointing_it_is_captured():
    captured(Checkpointed().eval())
    captured(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))


class Attention(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            x = self.linear(x).reshape(1, 1, 2, 4)
            return functional.scaled_dot_product_attention(x, x, x, dropout_p=self.probability)

        return checkpoint(attend, x, use_reentrant=False)


def test_attention_is_refused_only_with_dropout():
    captured(Attention(0.0))
    with pytest.raises(CaptureError, match="the backward draws random numbers again"):
        captured(Attention(0.5))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _Rounded.apply(self.linear(x))


def test_a_backward_may_draw_numbers_of_its_own():
    module, x = Rounding(), torch.ones(2, 4)
    bound = captured(module).bind(module)
    torch.manual_seed(1)
    found = bound(x)
    torch.manual_seed(1)
    module(x).sum().backward()
    assert torch.equal(found[1], module.linear.weight.grad)
