"""The groups that passes move collectives to are made before a rank can fail, and apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed

from gt_config import CompileConfig, EpOverlapConfig
from gt_passes import SeparateExchangeGroup, SeparateReductionGroup
from gt_trace.testing import fake_world
from gt_trainer.steps import new_training_step

NUM_RANKS = 32


def test_reductions_and_exchanges_have_groups_of_their_own_where_ep_takes_all_ranks():
    """FSDP and experts then have one group, of which a communicator runs one thing at a time."""
    options = CompileConfig(fsdp_second_group=True, ep_overlap=EpOverlapConfig(enabled=True))
    with fake_world(rank=0, world_size=NUM_RANKS):
        distributed.set_spmd_backend("partial_dtensor")
        dims = ParallelDims(
            dp_replicate=1,
            dp_shard=NUM_RANKS,
            cp=1,
            tp=1,
            pp=1,
            ep=NUM_RANKS,
            world_size=NUM_RANKS,
            spmd_backend="partial_dtensor",
        )
        dims.build_mesh()
        parts = SimpleNamespace(options=options, parallel_dims=dims)
        new_training_step._create_second_groups(cast("Any", parts))
        num_groups = len(dist.distributed_c10d._world.pg_map)
        fsdp, ep = (dims.get_mesh(axis).get_group().group_name for axis in ("fsdp", "ep"))
        reductions = SeparateReductionGroup().second_group(fsdp)
        exchanges = SeparateExchangeGroup().second_group(ep)
        assert len(dist.distributed_c10d._world.pg_map) == num_groups  # none was missing
    assert fsdp == ep
    assert len({fsdp, reductions, exchanges}) == 3
