"""Every cut of a stage computes what the joint graph computes, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_models import (
    ACTIVATION,
    Block,
    CountingBlock,
    RandomStage,
    ReadsWritten,
    Selecting,
    random_inputs,
    run_joint,
    run_recomposed,
    same_bits,
    squared_error,
)
from torch import Tensor, nn

from gt_pipeline.graph import StageGraphs, capture_stage, cut_stage
from gt_pipeline.graph.stage_cut import find_recomposition_problems
from gt_pipeline.runner import MicrobatchInputs

pieces = st.lists(
    st.tuples(st.sampled_from(RandomStage.PIECES), st.integers(0, 5)), min_size=1, max_size=6
)


def recomposes(graphs: StageGraphs) -> bool:
    inputs = random_inputs(graphs.capture)
    torch.manual_seed(1)
    expected = run_joint(graphs.capture, inputs)
    for split_backward in (False, True):
        torch.manual_seed(1)
        got = run_recomposed(graphs, inputs, split_backward=split_backward)
        if not (same_bits(expected[0], got[0]) and same_bits(expected[1], got[1])):
            return False
    return True


@settings(max_examples=10, deadline=None)
@given(pieces=pieces, num_inputs=st.integers(1, 2), num_outputs=st.integers(1, 2))
def test_random_stages_recompose(
    pieces: list[tuple[str, int]], num_inputs: int, num_outputs: int
) -> None:
    stage = RandomStage(pieces, num_inputs=num_inputs, num_outputs=num_outputs)
    capture = capture_stage(
        stage, stage_index=1, num_stages=3, activations=[ACTIVATION] * num_inputs
    )
    assert recomposes(cut_stage(capture))


@pytest.mark.parametrize("module", [Block, CountingBlock, Selecting, ReadsWritten])
def test_stage_in_the_middle_recomposes(module: type[nn.Module]) -> None:
    capture = capture_stage(module(), stage_index=1, num_stages=3, activations=[ACTIVATION])
    assert recomposes(cut_stage(capture))


def test_first_stage_recomposes() -> None:
    stage = nn.Sequential(nn.Embedding(5, 8), Block())
    tokens = torch.randint(0, 5, (2, 3))
    capture = capture_stage(
        stage, stage_index=0, num_stages=3, inputs=MicrobatchInputs(args=(tokens,))
    )
    assert recomposes(cut_stage(capture))


def test_last_stage_with_its_loss_recomposes() -> None:
    capture = capture_stage(
        CountingBlock(),
        stage_index=2,
        num_stages=3,
        activations=[ACTIVATION],
        inputs=MicrobatchInputs(target=torch.randn(4, 8)),
        loss_fn=squared_error,
    )
    assert recomposes(cut_stage(capture))


class _DifferentiatesAtOnce(torch.autograd.Function):
    """A loss that knows its gradient when it is computed, as one that is computed in chunks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (x, weight)]
            loss = torch.relu(leaves[0] * leaves[1]).square().sum()
            gradients = torch.autograd.grad(loss, leaves)
        ctx.gradients = [each * 0.5 for each in gradients]
        return loss.detach() * 0.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient * each for each in ctx.gradients)


class DifferentiatesAtOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return _DifferentiatesAtOnce.apply(self.block(x), self.weight)


def test_a_forward_that_differentiates_keeps_that_in_its_own_graph() -> None:
    capture = capture_stage(
        DifferentiatesAtOnce(),
        stage_index=2,
        num_stages=3,
        activations=[ACTIVATION],
        loss_fn=lambda output, target: output,
    )
    graphs = cut_stage(capture)
    assert recomposes(graphs)
    relu_backward = torch.ops.aten.threshold_backward.default
    assert graphs.full_backward is not None
    for graph in (graphs.forward, graphs.full_backward):
        found = graph.graph_module.graph.find_nodes(op="call_function", target=relu_backward)
        assert len(found) == 1  # that of the loss, and that of the block


def test_an_operator_that_was_exchanged_is_found_without_running_anything() -> None:
    graphs = cut_stage(
        capture_stage(Block(), stage_index=1, num_stages=3, activations=[ACTIVATION])
    )
    assert list(find_recomposition_problems(graphs)) == []
    (relu,) = graphs.forward.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    relu.target = torch.ops.aten.sigmoid.default
    problems = list(find_recomposition_problems(graphs))
    assert any("sigmoid" in str(problem) for problem in problems)
