"""Actions have what they need and no more, and what order would break is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_models import ACTIVATION, Block, CountingBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gt_passes import PassContext, PassManager, RecomputeTagged, TagSavedTensors, Verifier
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph import (
    GraphPipelineStage,
    StageCapture,
    StageGraphs,
    capture_stage,
    cut_stage,
)
from gt_pipeline.graph.stage_cut import find_recomposition_problems
from gt_pipeline.runner import ActivationSignature, MicrobatchInputs
from gt_trace import collective_counts
from gt_trace.fsdp import MixedPrecision, shard
from gt_trace.testing import fake_world

aten = torch.ops.aten


def graphs_of(module: nn.Module) -> StageGraphs:
    return cut_stage(capture_stage(module, stage_index=1, num_stages=3, activations=[ACTIVATION]))


def sharded_graphs(precision: MixedPrecision | None = None, *, rank: int = 0) -> StageGraphs:
    with fake_world(rank=rank, world_size=4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        module = Block(hidden=15)
        shard(module, mesh, mode="shard", mixed_precision=precision)
        dtype = torch.bfloat16 if precision is not None else torch.float32
        activation = torch.zeros(4, 8, dtype=dtype, device="meta", requires_grad=True)
        capture = capture_stage(module, stage_index=1, num_stages=3, activations=[activation])
        return cut_stage(capture)


def test_collectives_of_fsdp_are_in_their_own_actions() -> None:
    graphs = sharded_graphs()
    counts = {graph.kind: dict(collective_counts(graph.graph_module)) for graph in graphs}
    assert counts == {
        "UNSHARD": {"all_gather_into_tensor": 6},
        "FORWARD": {},
        "FULL_BACKWARD": {},
        "BACKWARD_INPUT": {},
        "BACKWARD_WEIGHT": {},
        "REDUCE_GRAD": {"reduce_scatter_tensor": 6},
    }


def test_every_slot_of_a_sharded_parameter_has_its_name() -> None:
    graphs = sharded_graphs()
    names = {name for name, _ in Block().named_parameters()}
    assert {slot.name for slot in graphs.unshard.inputs} == names
    assert {slot.name for slot in graphs.unshard.outputs} == names
    assert {s.kind for s in graphs.forward.static_inputs} == {"unsharded"}
    assert graphs.reduce_grad is not None
    assert {slot.name for slot in graphs.reduce_grad.inputs} == names
    assert {slot.name for slot in graphs.reduce_grad.outputs} == names


@pytest.mark.parametrize("rank", [0, 3])
def test_uneven_shards_recompose(rank: int) -> None:
    assert list(find_recomposition_problems(sharded_graphs(rank=rank))) == []


def test_gradients_accumulate_in_the_dtype_of_their_reduction() -> None:
    graphs = sharded_graphs(MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert graphs.full_backward is not None
    dtypes = {
        result.meta["val"].dtype
        for slot, result in zip(
            graphs.full_backward.outputs, graphs.full_backward.result_nodes(), strict=True
        )
        if slot.kind == "unsharded_gradient"
    }
    assert dtypes == {torch.float32}


def test_without_sharding_there_is_nothing_to_gather_or_reduce() -> None:
    graphs = graphs_of(Block())
    assert graphs.unshard.is_empty
    assert graphs.reduce_grad is not None
    assert graphs.reduce_grad.is_empty


def test_the_first_stage_has_nothing_to_do_for_inputs() -> None:
    graphs = cut_stage(
        capture_stage(
            Block(),
            stage_index=0,
            num_stages=3,
            inputs=MicrobatchInputs(args=(torch.zeros(4, 8),)),
        )
    )
    assert graphs.backward_input is not None
    assert graphs.backward_input.is_empty


def test_the_backward_of_inputs_computes_no_gradient_of_a_weight() -> None:
    graphs = graphs_of(Block())
    assert graphs.backward_input is not None
    assert graphs.backward_weight is not None
    products = [
        len(graph.graph_module.graph.find_nodes(op="call_function", target=aten.mm.default))
        for graph in (graphs.backward_input, graphs.backward_weight)
    ]
    assert products == [2, 2]


def test_updates_of_buffers_are_in_the_forward_and_only_there() -> None:
    graphs = graphs_of(CountingBlock())
    writes = {
        graph.kind: [
            node.name
            for node in graph.graph_module.graph.nodes
            if node.target is torch.ops.aten.add_.Tensor
        ]
        for graph in graphs
    }
    assert len(writes.pop("FORWARD")) == 1
    assert not any(writes.values())


def test_every_graph_passes_the_verifier() -> None:
    for graphs in (graphs_of(CountingBlock()), sharded_graphs()):
        for graph in graphs:
            if not graph.is_empty:
                assert Verifier().verify(graph.graph_module).problems == (), graph.kind


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block(hidden=256) for i in range(3, 6)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_what_a_memory_policy_computes_again_is_not_saved() -> None:
    def recompute(capture: StageCapture) -> None:
        graph_module = capture.traced.graph_module
        static = capture.traced.inputs[: capture.traced.num_static_inputs]
        context = PassContext.from_graph(
            graph_module, static_input_names=tuple(each.name for each in static)
        )
        passes = [TagSavedTensors(policy="full_recompute"), RecomputeTagged()]
        PassManager(passes, context=context).run(graph_module)

    module = Layers()
    # Activations must outweigh gradients, or computing again would not pay.
    many_rows = ActivationSignature(shape=(512, 8), dtype=torch.float32, requires_grad=True)
    stages = [
        GraphPipelineStage(
            module,
            stage_index=1,
            num_stages=3,
            activations=[many_rows],
            prepare_capture=prepare,
        )
        for prepare in (None, recompute)
    ]
    x, gradient = torch.randn(512, 8), torch.randn(512, 8)
    found = []
    for stage in stages:
        stage.forward(0, (x,), MicrobatchInputs())
        stage.full_backward(0, (gradient,))
        stage.reduce_gradients()
        found.append(dict(stage.gradients()))
    num_saved = [
        sum(slot.kind == "saved" for slot in stage.graphs.forward.outputs) for stage in stages
    ]
    assert num_saved[1] < num_saved[0]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Writes(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(8))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x) * self.weight


class _WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x + seen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.add_(1.0)
        return gradient, None


def _write_input(module: Writes, x: Tensor) -> Tensor:
    x.detach().add_(1.0)
    return x


def _write_parameter(module: Writes, x: Tensor) -> Tensor:
    module.weight.detach().mul_(0.5)
    return x


def _write_in_backward(module: Writes, x: Tensor) -> Tensor:
    return _WritesInBackward.apply(x, module.seen)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (
            _write_input,
            "add_ (aten.add_.Tensor) writes to argument activations[0], which belongs to another stage: write to a copy",
        ),
        (
            _write_parameter,
            "mul_ (aten.mul_.Tensor) writes to parameter weight, which all microbatches read: write to a copy",
        ),
        (
            _write_in_backward,
            "add_ (aten.add_.Tensor) writes to buffer seen in the backward, and FORWARD, BACKWARD_WEIGHT touch it too: the order of microbatches would decide what they find",
        ),
    ],
)
def test_refuses_writes_whose_order_a_pipeline_would_change(write: Any, problem: str) -> None:
    with pytest.raises(StageCutError) as caught:
        graphs_of(Writes(write))
    assert str(caught.value) == (
        f"the graph of stage 1 of 3 cannot be cut into actions:\n  - {problem}"
    )
