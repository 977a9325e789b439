"""UNSHARD and REDUCE_GRAD in parts: all launches first, what needs a result of another behind it."""

from __future__ import annotations

import pytest
from stage_models import ACTIVATION, Block
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from gt_passes.analysis.collectives import is_collective, is_wait
from gt_pipeline.graph import StageGraphs, capture_stage, cut_stage
from gt_pipeline.graph.launched_executable import LaunchedExecutable
from gt_trace.fsdp import ShardingMode, shard
from gt_trace.testing import fake_world


def cut(mode: ShardingMode, sizes: tuple[int, ...]) -> StageGraphs:
    module = Block(hidden=15)
    names = ("replicate", "shard")[-len(sizes) :]
    shard(module, init_device_mesh("cpu", sizes, mesh_dim_names=names), mode=mode)
    capture = capture_stage(module, stage_index=1, num_stages=3, activations=[ACTIVATION])
    return cut_stage(capture)


def order(graph_module: GraphModule) -> str:
    """L for each launch and w for each wait."""
    marks = ("L" * is_collective(node) + "w" * is_wait(node) for node in graph_module.graph.nodes)
    return "".join(marks)


@pytest.mark.parametrize(
    ("mode", "sizes", "unshard", "reduce"),
    [
        ("shard", (2,), "L" * 6 + "w" * 6, "L" * 6 + "w" * 6),
        ("replicate", (2,), "", "L" * 6 + "w" * 6),
        ("hybrid_shard", (2, 2), "L" * 6 + "w" * 6, "L" * 6 + "wL" * 6 + "w" * 6),
    ],
)
def test_launches_stand_before_waits_that_they_do_not_need(
    mode: ShardingMode, sizes: tuple[int, ...], unshard: str, reduce: str
) -> None:
    with fake_world(rank=0, world_size=4):
        graphs = cut(mode, sizes)
        assert graphs.reduce_grad is not None
        for action, expected in ((graphs.unshard, unshard), (graphs.reduce_grad, reduce)):
            before = [node.name for node in action.graph_module.graph.nodes]
            launched = LaunchedExecutable(action, verify=True)
            assert order(launched.action.graph_module) == expected
            assert launched.num_parts == 1 + expected.replace("L", "").count("w") // 6
            assert [node.name for node in action.graph_module.graph.nodes] == before
