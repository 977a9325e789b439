"""A backward that runs a forward and a backward of its own is annotated as any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gt_config.node_keys import ModuleAnnotation, PhaseAnnotation
from gt_trace import annotate, trace_step
from gt_trace.capture.forward_in_backward import forward_in_backward
from gt_trace.node_metadata import is_backward, module_fqn, phase_of


class Again(torch.autograd.Function):
    """sin, which runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with (
            forward_in_backward(),
            annotate(PhaseAnnotation(phase="backward")),
            annotate(ModuleAnnotation(fqn=ctx.name)),
            torch.enable_grad(),
        ):
            source = x.detach().requires_grad_()
            result = source.sin()
        (found,) = torch.autograd.grad(result, source, gradient)
        return found.exp(), None


def step(x: Tensor) -> Tensor:
    second: Tensor = Again.apply(Again.apply(x, "first"), "second")
    (gradient,) = torch.autograd.grad(second.sum(), x)
    return gradient


def test_what_follows_a_backward_inside_of_another_one_is_marked_as_before() -> None:
    x = torch.ones(3, requires_grad=True)
    nodes = trace_step(step)(x).graph_module.graph.nodes
    calls = [node for node in nodes if node.op == "call_function"]

    def called(name: str) -> list[Node]:
        return [node for node in calls if getattr(node.target, "_opname", "") == name]

    assert not [node.name for node in calls if node.meta.get("is_gradient_acc", False)]
    # The second module's comes first in the backward, and the first one's after a whole backward.
    assert [module_fqn(node) for node in called("cos")] == ["second", "first"]
    again = called("sin")[2:]
    assert [module_fqn(node) for node in again] == ["second", "first"]
    assert [phase_of(node) for node in again] == ["backward", "backward"]
    assert not any(is_backward(node) for node in again)
    assert [is_backward(node) for node in called("exp")] == [True, True]
