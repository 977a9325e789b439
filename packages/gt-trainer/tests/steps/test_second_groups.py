"""The groups that passes move collectives to are made before a rank can fail, and apart."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed

from gt_autoparallel import PlacedModel
from gt_config import CompileConfig, EpOverlapConfig
from gt_passes import SeparateExchangeGroup, SeparateReductionGroup
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.testing import fake_world
from gt_trainer.placement.planned_mesh import planned_mesh
from gt_trainer.steps.second_groups import create_second_groups

NUM_RANKS = 32


def dims_of(*, ep: int, world_size: int, tp: int = 1) -> ParallelDims:
    distributed.set_spmd_backend("partial_dtensor")
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=world_size // tp,
        cp=1,
        tp=tp,
        pp=1,
        ep=ep,
        world_size=world_size,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims


def test_reductions_and_exchanges_have_groups_of_their_own_where_ep_takes_all_ranks():
    """FSDP and experts then have one group, of which a communicator runs one thing at a time."""
    options = CompileConfig(fsdp_second_group=True, ep_overlap=EpOverlapConfig(enabled=True))
    with fake_world(rank=0, world_size=NUM_RANKS):
        dims = dims_of(ep=NUM_RANKS, world_size=NUM_RANKS)
        given = create_second_groups(options, dims, [])
        num_groups = len(dist.distributed_c10d._world.pg_map)
        fsdp, ep = (dims.get_mesh(axis).get_group().group_name for axis in ("fsdp", "ep"))
        reductions = SeparateReductionGroup().second_group(fsdp)
        exchanges = SeparateExchangeGroup().second_group(ep)
        assert len(dist.distributed_c10d._world.pg_map) == num_groups  # none was missing
        assert {reductions, exchanges} < {each.group_name for each in given.values()}
    assert fsdp == ep
    assert len({fsdp, reductions, exchanges}) == 3


@pytest.mark.parametrize("rank", range(4))
def test_all_ranks_make_the_groups_of_the_same_axes_in_the_same_order(rank: int) -> None:
    options = CompileConfig(fsdp_second_group=True, ep_overlap=EpOverlapConfig(enabled=True))
    with fake_world(rank=rank, world_size=4):
        dims = dims_of(ep=2, world_size=4)
        fsdp, efsdp, ep = (
            dims.get_mesh(axis).get_group().group_name for axis in ("fsdp", "efsdp", "ep")
        )
        before = set(dist.distributed_c10d._world.pg_map)
        given = create_second_groups(options, dims, [])
        made = [g for g in dist.distributed_c10d._world.pg_map if g not in before]
        assert list(given.values()) == made
        assert list(given) == ["reductions of fsdp", "reductions of efsdp", "exchanges of ep"]
        descriptions = [group.group_desc for group in made]
    assert descriptions == [
        f"gt_passes: reductions of {fsdp}",
        f"gt_passes: reductions of {efsdp}",
        f"gt_passes: exchanges of {ep}",
    ]


@pytest.mark.parametrize("rank", [0, 5])
def test_exchanges_of_placed_experts_have_groups_of_their_own_whatever_their_axes(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group over several axes too, and of a stage's, which a stage before it may have had."""
    options = CompileConfig(autoparallel=True, ep_overlap=EpOverlapConfig(enabled=True))
    with fake_world(rank=rank, world_size=8):
        dims = dims_of(ep=8, tp=2, world_size=8)
        mesh = planned_mesh(dims)
        of_world = DeviceMesh.from_group(dist.new_group(range(8)), "cpu")
        names = mesh.mesh_dim_names
        assert names is not None
        last = mesh[names[-1]]
        parts = {
            nn.Module(): PlacedModel(plan=Mock(), mesh=mesh, expert_meshes=meshes)
            for meshes in ({}, {names: of_world}, {names[-1:]: last, names: of_world})
        }
        monkeypatch.setattr("gt_autoparallel.placed_model", parts.get)
        given = create_second_groups(options, dims, [nn.Module(), *parts])
        num_groups = len(dist.distributed_c10d._world.pg_map)
        second = [
            SeparateExchangeGroup().second_group(each.get_group().group_name)
            for each in (of_world, last)
        ]
        assert len(dist.distributed_c10d._world.pg_map) == num_groups  # none was missing
        axes = MeshAxes.of(groups={label: each.group_name for label, each in given.items()})
        assert [axes.label_of_group(each) for each in second] == list(given)
    assert list(given) == [
        f"exchanges of experts over {' and '.join(names)}",
        f"exchanges of experts over {names[-1]}",
    ]


@pytest.mark.parametrize("num_experts", [0, 1])
def test_says_that_experts_which_exchange_nothing_have_nothing_to_overlap(
    num_experts: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage without experts has nothing to say."""
    options = CompileConfig(autoparallel=True, ep_overlap=EpOverlapConfig(enabled=True))
    plan = Mock()
    plan.graph.of_kind.return_value = [Mock()] * num_experts
    with fake_world(rank=0, world_size=4):
        dims = dims_of(ep=2, world_size=4)
        placed = PlacedModel(plan=plan, mesh=planned_mesh(dims), expert_meshes={})
        monkeypatch.setattr("gt_autoparallel.placed_model", lambda _: placed)
        assert create_second_groups(options, dims, [nn.Module()]) == {}
    said = (
        "--compile.ep_overlap.enabled hides nothing: by its plan each rank keeps its tokens, and "
        "what runs in chunks waits for no exchange"
    )
    assert caplog.messages.count(said) == num_experts
