"""Microbatches of a step that gather and reduce once: the bits of one reduction, and the graphs."""

from __future__ import annotations

import pytest
import torch
from accumulated_steps import BATCH, captured, cut, train_like_eager
from stage_models import Block, CountingBlock
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes import CudaGraphs, PassContext
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.testing import FakeRecorder
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph import AccumulatedStep, AccumulationGraphs, cut_accumulation
from gt_trace import (
    InputMismatchError,
    StateMismatchError,
    module_fqn,
    phase_of,
    write_annotation,
)
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


def marked(module: nn.Module, num_microbatches: int, recorder: FakeRecorder) -> AccumulationGraphs:
    """The step of a module, cut, and marked to be recorded as a whole."""
    graphs = cut(module, num_microbatches)
    record = CudaGraphs(
        target=CaptureTarget(device_type="cpu"), new_recorder=lambda: recorder, whole=True
    )
    for each in graphs.graphs:
        context = PassContext.from_graph(
            each.graph_module, static_input_names=each.static_input_names
        )
        assert not record.run(each.graph_module, context).refusals
    return graphs


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_a_replayed_step_is_one_launch_and_keeps_every_bit(num_microbatches: int):
    torch.manual_seed(0)
    module, reference = CountingBlock(), CountingBlock()
    reference.load_state_dict(module.state_dict())
    recorder = FakeRecorder()
    step = AccumulatedStep(marked(module, num_microbatches, recorder), module)
    plain = AccumulatedStep(cut(reference, num_microbatches), reference)
    kept = []
    for number in range(4):
        given = [(x + number, y) for x, y in batches(num_microbatches)]
        found, expected = step(iter(given)), plain(iter(given))
        kept.append((found, expected))
        assert recorder.num_replays == number, "the first step runs as it is"
        assert torch.equal(module.seen, reference.seen)
    assert recorder.num_recorded == 1
    for found, expected in kept:  # later launches leave what earlier ones gave
        assert all(map(torch.equal, found.gradients, expected.gradients))
        for own, its in zip(found.results, expected.results, strict=True):
            assert all(map(torch.equal, own, its))
    step.release()
    assert recorder.num_resets == 1


def test_a_replayed_step_gives_none_for_what_is_not_used_and_reads_new_parameters():
    recorder = FakeRecorder()
    module = Shifted()
    step = AccumulatedStep(marked(module, 2, recorder), module)
    given = [(x, torch.ones(BATCH)) for x, _ in batches(2)]
    for number in range(4):
        if number == 2:
            module.shift = nn.Parameter(torch.ones(BATCH))
        found = step(given)
        shift, unused = found.gradients
        assert torch.equal(shift, torch.full(BATCH, 2.0 * x_elements()))
        assert unused is None
        ((first,), _) = found.results
        expected = x_elements() * (given[0][0] + module.shift.detach()).sum()
        assert first.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (recorder.num_recorded, recorder.num_replays) == (2, 2)


def test_a_step_that_is_replayed_refuses_any_bad_microbatch_before_the_launch():
    recorder = FakeRecorder()
    module = CountingBlock()
    step = AccumulatedStep(marked(module, 2, recorder), module)
    first, (x, y) = batches(2)
    for _ in range(2):
        step([first, (x, y)])
    seen = module.seen.clone()
    with pytest.raises(InputMismatchError):
        step([first, (x[:2], y[:2])])
    with pytest.raises(ValueError, match="1 microbatches were given, and 2 captured"):
        step([first])
    with pytest.raises(ValueError, match="3 microbatches were given, and 2 captured"):
        step([first, first, first])
    module.eval()
    with pytest.raises(StateMismatchError):
        step([first, first])
    assert recorder.num_replays == 1
    assert torch.equal(module.seen, seen)


def x_elements() -> int:
    """How often the gradient of the sum is added: the loss weighs it by as many ones."""
    return BATCH[0] * BATCH[1]


def test_a_step_that_is_refused_has_warmed_up_nothing():
    recorder = FakeRecorder()
    step = AccumulatedStep(marked(CountingBlock(), 2, recorder), CountingBlock())
    first, (x, y) = batches(2)
    with pytest.raises(InputMismatchError):
        step([(x[:2], y[:2]), first])
    step([first, first])
    assert (recorder.num_recorded, recorder.num_replays) == (0, 0)
    step([first, first])
    assert (recorder.num_recorded, recorder.num_replays) == (1, 1)


def test_a_parameter_of_several_plain_tensors_is_read_where_all_of_them_lie():
    recorder = FakeRecorder()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.arange(8.0)
            self.weight = nn.Parameter(TwoTensor(weight, weight + 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    module = Twice()
    step = AccumulatedStep(marked(module, 2, recorder), module)
    plain = AccumulatedStep(cut(module, 2), module)
    for _ in range(3):
        given = batches(2)
        found, expected = step(given), plain(given)
        for own, its in zip(found.gradients, expected.gradients, strict=True):
            assert torch.equal(own.a, its.a)
            assert torch.equal(own.b, its.b)
    assert recorder.num_replays == 2


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
