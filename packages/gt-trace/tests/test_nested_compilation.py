"""Models that compile a part of themselves: the graph is of what is written, and of nothing else.

Whatever was captured before in the process, and however the caller has PyTorch compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gt_trace import ConstantCapturedError, TracedStep, flex_attention_on_cpu, trace_step
from gt_trace.capture.purity import refuse_constants

BLOCK = 16


@torch.compile
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Attention(nn.Module):
    """x is (B, heads, L, 4)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = scale

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        x = doubled(x * self.weight)
        return flex_attention(x, x, x, block_mask=mask, scale=self.scale)


def capture(scale: float, length: int) -> TracedStep:
    model = Attention(scale)
    documents = torch.zeros(2, length, dtype=torch.int64)

    def in_document(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return documents[batch, query] == documents[batch, key]

    mask = create_block_mask(in_document, 2, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    return trace_step(step_of(model), module=model)(torch.rand(2, 2, length, 4), mask)


def step_of(model: nn.Module) -> Callable[..., Any]:
    def step(x: torch.Tensor, mask: BlockMask) -> Any:
        loss = model(x, mask).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


@pytest.fixture(autouse=True)
def attention_trains_on_cpu() -> Iterator[None]:
    with flex_attention_on_cpu():
        yield


def test_graph_does_not_depend_on_what_was_captured_before() -> None:
    targets = [
        [str(node.target) for node in capture(scale, length).graph_module.graph.nodes]
        for scale, length in ((0.25, 32), (0.5, 32), (0.125, 64))
    ]
    assert targets[0] == targets[1] == targets[2]


def test_callers_stance_does_not_freeze_what_masks_close_over() -> None:
    with torch.compiler.set_stance("force_eager"):
        step = capture(0.25, 32)
    placeholders = step.graph_module.graph.find_nodes(op="placeholder")
    nodes = {given.name: node for node, given in zip(placeholders, step.inputs, strict=True)}
    assert len(nodes["mask._closure_0"].users) == 2  # forward and backward


def test_constants_that_a_score_closes_over_are_refused() -> None:
    slopes = torch.tensor([1.0, 2.0])
    model = Attention(0.25)

    def sloped(
        score: torch.Tensor,
        batch: torch.Tensor,
        head: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        return score + slopes[head]

    def step(x: torch.Tensor) -> Any:
        loss = flex_attention(x * model.weight, x, x, score_mod=sloped).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    with pytest.raises(ConstantCapturedError, match=r"torch\.float32 \[2\]"):
        trace_step(step, module=model)(torch.rand(2, 2, 32, 4))


def test_constants_in_the_graph_of_an_operator_are_refused() -> None:
    step = capture(0.25, 32)
    mask: Any = step.graph_module.sdpa_mask0
    mask.register_buffer("documents", torch.zeros(2, 32))
    graph = mask.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.neg.default, (graph.get_attr("documents"),))
    with pytest.raises(ConstantCapturedError, match=r"torch\.float32 \[2, 32\], in sdpa_mask0"):
        refuse_constants(step.graph_module, ())
