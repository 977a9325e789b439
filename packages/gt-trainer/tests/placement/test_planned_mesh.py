"""Which mesh is planned, how batches lie on it, and what is demanded of experts on it."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from gt_autoparallel import MeshShape
from gt_trainer.placement.planned_mesh import (
    batch_layout,
    expert_layouts,
    expert_token_layouts,
    num_batch_shards,
    planned_axes,
    planned_mesh,
)


def mesh(**sizes: int) -> MeshShape:
    return MeshShape(names=tuple(sizes), sizes=tuple(sizes.values()))


@pytest.mark.parametrize(
    ("degrees", "planned"),
    [
        ((1, 4, 1, 1), mesh(fsdp=4)),
        ((2, 1, 3, 1), mesh(tp=3, dp_replicate=2)),
        ((2, 4, 1, 2), mesh(ep=2, dp_replicate=2, efsdp=2)),
        ((1, 4, 1, 4), mesh(ep=4)),
        ((1, 1, 2, 2), mesh(tp_in_ep=2)),
        ((1, 4, 2, 2), mesh(tp_in_ep=2, fsdp=4)),
        ((1, 4, 2, 8), mesh(dp_shard_in_ep=4, tp_in_ep=2)),
    ],
)
def test_axes_of_one_rank_are_not_planned(
    degrees: tuple[int, int, int, int], planned: MeshShape
) -> None:
    names = ("dp_replicate", "dp_shard", "tp", "ep")
    found = planned_axes(**dict(zip(names, degrees, strict=True)))
    assert (found.names, found.sizes) == (planned.names, planned.sizes)


@pytest.mark.parametrize(
    ("planned", "layout", "num_shards"),
    [
        (mesh(fsdp=4), (Shard(0),), 4),
        (mesh(fsdp=2, tp=3), (Shard(0), Replicate()), 2),
        (mesh(dp_replicate=2, efsdp=3, ep=4), (Shard(0), Shard(0), Shard(0)), 24),
    ],
    ids=["fsdp", "fsdp-tp", "hsdp-ep"],
)
def test_batches_lie_over_all_axes_but_that_of_tensor_parallelism(
    planned: MeshShape, layout: object, num_shards: int
) -> None:
    assert batch_layout(planned) == layout
    assert num_batch_shards(planned) == num_shards


@pytest.mark.parametrize(
    ("degrees", "planned"),
    [
        ({"tp": 2}, MeshShape(names=("tp", "fsdp"), sizes=(2, 4), strides=(1, 2))),
        ({"ep": 4}, MeshShape(names=("ep", "efsdp"), sizes=(4, 2), strides=(1, 4))),
        ({"dp_replicate": 2}, MeshShape(names=("dp_replicate", "fsdp"), sizes=(2, 4))),
        ({}, MeshShape(names=("fsdp",), sizes=(8,))),
        ({"tp": 2, "ep": 2}, MeshShape(names=("tp_in_ep", "fsdp"), sizes=(2, 4), strides=(1, 2))),
        (
            {"tp": 2, "ep": 4},
            MeshShape(
                names=("dp_shard_in_ep", "tp_in_ep", "efsdp"), sizes=(2, 2, 2), strides=(2, 1, 4)
            ),
        ),
        (
            {"tp": 4, "ep": 2},
            MeshShape(names=("tp_mod_ep", "tp_in_ep", "fsdp"), sizes=(2, 2, 2), strides=(2, 1, 4)),
        ),
    ],
    ids=[
        "tensor-parallel",
        "expert-parallel",
        "data-parallel",
        "one-axis",
        "experts-over-tensor-parallel-ranks",
        "experts-over-more",
        "experts-over-fewer",
    ],
)
def test_what_cuts_computation_cuts_first_and_stays_with_neighbors(
    degrees: dict[str, int], planned: MeshShape
) -> None:
    dist_utils.init_fake_mode(8)
    try:
        sizes = {"dp_replicate": 1, "tp": 1, "ep": 1, **degrees}
        shard = 8 // sizes["tp"] // sizes["dp_replicate"]
        dims = ParallelDims(
            **sizes, dp_shard=shard, cp=1, pp=1, world_size=8, spmd_backend="partial_dtensor"
        )
        mesh = planned_mesh(dims)
        assert MeshShape.of(mesh) == planned
        # Plan files are checked before there is a mesh.
        degrees_alone = {name: sizes[name] for name in ("dp_replicate", "tp", "ep")}
        assert planned_axes(**degrees_alone, dp_shard=shard) == planned
        # Groups are the run's own: no second communicator, and reports know what they are for.
        for name in planned.names:
            own = "tp" if name == "tp_in_ep" and dims.tp <= dims.ep else name
            if own not in ("dp_shard_in_ep", "tp_mod_ep", "tp_in_ep"):
                assert mesh.get_group(name) is dims.get_mesh(own).get_group()
    finally:
        dist.destroy_process_group()


def test_experts_are_placed_anyhow_or_over_their_axis_or_nowhere() -> None:
    planned = mesh(efsdp=2, ep=2)
    assert expert_layouts("any", planned) == {}
    assert expert_layouts("expert_parallel", planned) == {"*": {"ep": Shard(0)}}
    assert expert_layouts("own_tokens", planned) == {"*": {"efsdp": Replicate(), "ep": Replicate()}}
    planned = mesh(dp_shard_in_ep=2, tp_in_ep=2, efsdp=2)
    assert expert_layouts("expert_parallel", planned) == {
        "*": {"dp_shard_in_ep": Shard(0), "tp_in_ep": Shard(0)}
    }


@pytest.mark.parametrize(
    ("planned", "tokens"),
    [
        (mesh(ep=2, efsdp=2), (Shard(0), Shard(0))),
        (mesh(tp=2, fsdp=2), (Replicate(), Shard(0))),
        (mesh(dp_shard_in_ep=2, tp_in_ep=2), (Shard(0), Shard(1))),
        (mesh(tp_mod_ep=2, tp_in_ep=2, fsdp=2), (Shard(1), Shard(1), Shard(0))),
    ],
    ids=["EP", "TP", "EP over more", "EP over fewer"],
)
def test_each_rank_routes_the_tokens_that_torchtitan_sums_over_it(
    planned: MeshShape, tokens: object
) -> None:
    assert expert_token_layouts(planned) == {"*": tokens}
