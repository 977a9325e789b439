"""Sums over microbatches are right also where gradients of one microbatch share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stage_models import ACTIVATION, CountingBlock
from torch import Tensor, nn

from gt_pipeline.graph import GraphPipelineStage, capture_stage, cut_stage
from gt_pipeline.graph.gradient_accumulators import GradientAccumulators, owned_results
from gt_pipeline.runner import MicrobatchInputs

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class TwoVectors(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8))
        self.second = nn.Parameter(torch.randn(8))
        self.compute = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.first, self.second)


SHARING: dict[str, tuple[Forward, tuple[bool, bool]]] = {
    "one value for both": (lambda x, p, q: x + (p + q), (False, False)),
    "one value, once on its way out": (lambda x, p, q: x[0] + (p + q), (False, False)),
    "each its own": (lambda x, p, q: x * p + torch.tanh(x * q), (True, True)),
    "an expanded number": (lambda x, p, q: x + p.sum() + (q * x), (False, True)),
    "halves of one": (
        lambda x, p, q: x.repeat(1, 2) * torch.cat([p, q]),
        (False, False),
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_gradients_that_share_memory_are_summed_each_by_itself(name: str) -> None:
    forward, owned = SHARING[name]
    module = TwoVectors(forward)
    stage = GraphPipelineStage(module, stage_index=1, num_stages=3, activations=[ACTIVATION])
    assert stage.graphs.full_backward is not None
    assert owned_results(stage.graphs.full_backward, "unsharded_gradient") == owned
    expected = TwoVectors(forward)
    expected.load_state_dict(module.state_dict())
    for microbatch in range(4):
        x = torch.randn(4, 8)
        y = expected(x)
        gradient = torch.randn(y.shape)
        y.backward(gradient)
        stage.forward(microbatch, (x,), MicrobatchInputs())
        if microbatch % 2:
            stage.full_backward(microbatch, (gradient,))
        else:
            stage.backward_input(microbatch, (gradient,))
            stage.backward_weight(microbatch)
    stage.reduce_gradients()
    for key, parameter in expected.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(stage.gradients()[key], parameter.grad), key


def test_one_value_after_common_subexpressions_were_merged_is_summed_for_each() -> None:
    """Two equal subexpressions become one node, and its value the gradient of two parameters."""

    def forward(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return x * 2 + p * 3 + q * 3

    def merge(graph_module: torch.fx.GraphModule, kind: str, context: object) -> None:
        seen: dict[tuple[object, ...], torch.fx.Node] = {}
        for node in graph_module.graph.nodes:
            key = (node.target, tuple(map(str, node.args)))
            if node.op != "call_function":
                continue
            if key in seen:
                node.replace_all_uses_with(seen[key])
            seen.setdefault(key, node)
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()

    module = TwoVectors(forward)
    stage = GraphPipelineStage(
        module, stage_index=1, num_stages=3, activations=[ACTIVATION], transform=merge
    )
    for microbatch in range(3):
        stage.forward(microbatch, (torch.zeros(4, 8),), MicrobatchInputs())
        stage.full_backward(microbatch, (torch.ones(4, 8),))
    stage.reduce_gradients()
    for gradient in stage.gradients().values():
        assert torch.equal(gradient, torch.full((8,), 3.0 * 4 * 3))


def test_nothing_added_is_told_from_sums_that_are_none() -> None:
    accumulators = GradientAccumulators()
    assert accumulators.take() is None
    accumulators.add([], [])
    assert accumulators.take() == []
    assert accumulators.take() is None


def test_an_owned_gradient_becomes_the_sum_and_another_is_copied() -> None:
    mine, shared = torch.ones(2), torch.ones(2)
    accumulators = GradientAccumulators()
    accumulators.add([mine, shared], [True, False])
    accumulators.add([torch.ones(2), torch.ones(2)], [True, False])
    sums = accumulators.take()
    assert sums is not None
    assert sums[0] is mine
    assert sums[1] is not shared
    assert torch.equal(shared, torch.ones(2))
    assert [each.tolist() for each in sums] == [[2.0, 2.0], [2.0, 2.0]]


def test_gradients_of_a_norm_are_told_apart_and_need_no_copy() -> None:
    graphs = cut_stage(
        capture_stage(CountingBlock(), stage_index=1, num_stages=3, activations=[ACTIVATION])
    )
    assert graphs.full_backward is not None
    assert all(owned_results(graphs.full_backward, "unsharded_gradient"))
