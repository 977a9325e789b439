"""Microbatches of a step that gather and reduce once: the bits of one reduction, and the graphs."""

from __future__ import annotations

import pytest
import torch
from accumulated_steps import BATCH, captured, cut, train_like_eager
from stage_models import Block, CountingBlock
from torch import nn

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph import AccumulatedStep, cut_accumulation
from gt_trace import InputMismatchError, module_fqn, phase_of, write_annotation
from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_losses_and_gradients_are_those_of_one_reduction_a_step(
    num_microbatches: int, two: GlooWorkers
) -> None:
    for differing, collectives in two.run(train_like_eager, num_microbatches):
        assert differing == []
        further = {"further": {}} if num_microbatches > 2 else {}
        assert collectives == {
            "first": {"all_gather_into_tensor": 6},
            **further,
            "last": {"reduce_scatter_tensor": 6},
        }


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(BATCH), torch.randn(BATCH)) for _ in range(count)]


def test_without_ranks_it_is_gradient_accumulation_and_buffers_are_written_in_order():
    torch.manual_seed(0)
    module, eager = CountingBlock(), CountingBlock()
    eager.load_state_dict(module.state_dict())
    found = AccumulatedStep(cut(module, 3), module)(batches(3))
    losses = [(eager(x) * y).sum() for x, y in batches(3)]
    for loss in losses:
        loss.backward()
    assert [loss.item() for (loss,) in found.results] == [loss.item() for loss in losses]
    assert torch.equal(module.seen, eager.seen)
    for gradient, parameter in zip(found.gradients, eager.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


class Shifted(nn.Module):
    """The gradient of its shift is one number, expanded; one parameter is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(BATCH))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift).sum()


def test_gradients_may_share_memory_with_themselves_or_be_missing():
    module = Shifted()
    found = AccumulatedStep(cut(module, 2), module)([(x, torch.ones(BATCH)) for x, _ in batches(2)])
    shift, unused = found.gradients
    assert torch.equal(shift, torch.full(BATCH, 2.0 * x_elements()))
    assert shift.stride() == module.shift.stride()
    assert unused is None


def x_elements() -> int:
    """How often the gradient of the sum is added: the loss weighs it by as many ones."""
    return BATCH[0] * BATCH[1]


def test_a_step_takes_as_many_microbatches_as_it_was_cut_for():
    step = AccumulatedStep(cut(Block(), 2), Block())
    with pytest.raises(ValueError, match="1 microbatches were given, and 2 captured"):
        step(batches(1))
    with pytest.raises(ValueError, match="more microbatches were given than the 2 captured"):
        step(batches(3))


def test_a_microbatch_of_another_shape_is_refused_before_anything_has_run():
    module = CountingBlock()
    step = AccumulatedStep(cut(module, 2), module)
    (x, y), second = batches(2)
    with pytest.raises(InputMismatchError):
        step([(x[:2], y[:2]), second])
    assert not module.seen.any()


def test_a_gathering_that_needs_a_microbatch_is_refused():
    traced = captured(Block())
    (relu,) = traced.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    annotation = FsdpCollectiveAnnotation(
        kind="unshard", parameter_names=("up.weight",), mesh_axis="fsdp"
    )
    write_annotation(relu, annotation)
    with pytest.raises(StageCutError) as error:
        cut_accumulation(traced, num_results=1, num_microbatches=2)
    first, *rest = str(error.value).splitlines()
    assert first == ("the step cannot be cut into microbatches that share gathering and reduction:")
    (problem,) = rest
    assert problem.startswith(
        "  - relu (aten.relu.default) is part of UNSHARD, and must run after "
    )
    assert problem.endswith("which is part of MICROBATCH")


def test_additions_belong_to_no_module_nor_reduction():
    graphs = cut(Block(), 2)
    added = [
        node
        for node in graphs.last.graph_module.graph.nodes
        if any(source.name in graphs.last.sum_names for source in node.all_input_nodes)
    ]
    assert len(added) == graphs.num_sums == 6
    assert all(module_fqn(node) == "" and phase_of(node) == "backward" for node in added)
