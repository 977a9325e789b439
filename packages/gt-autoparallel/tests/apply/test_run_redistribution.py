"""What the steps of a redistribution say of themselves while they are traced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from gt_autoparallel.apply.rank_mesh import RankMesh
from gt_autoparallel.apply.run_redistribution import local_move
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.placement_graph import TensorSpec
from gt_autoparallel.graph.redistribution import redistribution_steps
from gt_config.node_keys import FsdpCollectiveAnnotation, FsdpCollectiveKind
from gt_trace.testing import fake_world

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESH = MeshShape(names=("data", "model"), sizes=(2, 2))
RANK = RankMesh(shape=MESH, group_names=("0", "1"), coordinate=(0, 1), device_type="cpu")
WEIGHT = TensorSpec(shape=(8, 4), stride=(4, 1), dtype=torch.float32)


def annotated_axes(kind: FsdpCollectiveKind, source: Layout, target: Layout) -> list[str]:
    """Kind of each step, with the axis that its annotation names."""
    steps = redistribution_steps(WEIGHT.shape, source, target, MESH)
    fsdp = FsdpCollectiveAnnotation(kind=kind, parameter_names=("w",), mesh_axis="data")
    move = local_move(WEIGHT, steps, RANK, fsdp=fsdp)
    assert len(move.annotations) == len(steps)
    return [
        f"{step.kind} {'' if each is None else each.mesh_axis}".strip()
        for step, each in zip(steps, move.annotations, strict=True)
    ]


def test_every_gathering_of_a_parameter_is_fsdps() -> None:
    assert annotated_axes("unshard", (S0, S1), (R, R)) == ["all_gather data", "all_gather model"]
    # Shards of one dim are put together from the innermost axis.
    assert annotated_axes("unshard", (S0, S0), (R, R)) == ["all_gather model", "all_gather data"]


def test_every_reduction_of_a_gradient_is_fsdps() -> None:
    found = annotated_axes("reduce_grad", (Partial("sum"), Partial("sum")), (S0, S1))
    assert sorted(found) == ["reduce_scatter data", "reduce_scatter model"]


def test_what_communicates_nothing_is_not_fsdps() -> None:
    assert annotated_axes("reduce_grad", (R, R), (S0, R)) == ["slice"]


def test_a_mask_travels_as_bytes_and_arrives_as_a_mask() -> None:
    mesh = MeshShape(names=("data",), sizes=(2,))
    spec = TensorSpec(shape=(8, 4), stride=(4, 1), dtype=torch.bool)
    with fake_world(rank=0, world_size=2):
        group = dist.group.WORLD.group_name
        rank = RankMesh(shape=mesh, group_names=(group,), coordinate=(0,), device_type="cpu")
        move = local_move(spec, redistribution_steps(spec.shape, (S0,), (R,), mesh), rank)
        traced = make_fx(move, tracing_mode="fake")(torch.ones(4, 4, dtype=torch.bool))
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    (node,) = traced.graph.find_nodes(op="call_function", target=gather)
    assert node.meta["val"].dtype is torch.uint8
    (result,) = traced.graph.output_node().args
    assert result.meta["val"].dtype is torch.bool
    assert result.meta["val"].shape == (8, 4)
