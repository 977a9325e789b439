"""A rank's part of an initial weight is the one that DTensor says it holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torchtitan.protocols.module import Module

from gt_trace._torch_internals import strided_shard
from gt_trace.testing import fake_world
from gt_trainer.decoder.initialization import draw_whole_weights


def counted(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view(weight.shape))


@pytest.mark.parametrize(
    ("placements", "part"),
    [
        ([Replicate(), Shard(0)], [4, 5, 6, 7]),
        ([Shard(0), Replicate()], [0, 1, 2, 3]),
        ([Shard(0), Shard(0)], [2, 3]),  # the first axis cuts first, as in a plan
        ([strided_shard(0, split_factor=2), Shard(0)], [4, 5]),  # the second one did, as TP does
    ],
)
def test_a_dim_that_two_axes_shard_is_cut_in_their_order(
    placements: list[Placement], part: list[int]
) -> None:
    with fake_world(rank=1, world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        model = Module()
        local = torch.empty(len(part))
        model.weight = nn.Parameter(
            DTensor.from_local(local, mesh, placements, run_check=False, shape=(8,), stride=(1,))
        )
        model._param_init = {"weight": counted}
        draw_whole_weights(model)
        model._param_init["weight"](model.weight)
        assert model.weight.to_local().tolist() == part
