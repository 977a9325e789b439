"""How batches lie on a planned mesh, and what is demanded of experts on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from gt_trainer.placement.planned_mesh import batch_layout, expert_layouts, num_batch_shards


def mesh(**sizes: int) -> Any:
    """As much of a DeviceMesh as is asked for."""
    return SimpleNamespace(mesh_dim_names=tuple(sizes), size=list(sizes.values()).__getitem__)


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
    planned: Any, layout: object, num_shards: int
) -> None:
    assert batch_layout(planned) == layout
    assert num_batch_shards(planned) == num_shards


def test_experts_are_placed_anyhow_or_over_their_axis_or_nowhere() -> None:
    planned = mesh(efsdp=2, ep=2)
    assert expert_layouts("any", planned) == {}
    assert expert_layouts("expert_parallel", planned) == {"*": {"ep": Shard(0)}}
    assert expert_layouts("own_tokens", planned) == {"*": {"efsdp": Replicate(), "ep": Replicate()}}
