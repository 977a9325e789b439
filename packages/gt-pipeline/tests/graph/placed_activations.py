"""Gradients of activations that are DTensors, on a few ranks. Workers import this by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from gt_pipeline.graph.activations import travelling_gradient


def summed_gradients(partial_kind: str) -> list[Tensor]:
    """What travels back for an activation that every rank has whole, summed over ranks.

    Of gradients that are whole, in parts of a sum, and cut; then, unsummed, of an activation that
    is itself in parts.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    value = torch.arange(8.0).reshape(4, 2)
    here = value.chunk(size)[dist.get_rank()]
    whole = DTensor.from_local(value, mesh, [Replicate()])
    of_parts = DTensor.from_local(value, mesh, [Partial(partial_kind)])
    gradients: list[tuple[Tensor, Placement]] = [
        (value, Replicate()),
        (value / size, Partial()),
        (here, Shard(0)),
    ]
    results = []
    for local, placement in gradients:
        travels = travelling_gradient(whole, DTensor.from_local(local, mesh, [placement])).clone()
        dist.all_reduce(travels)
        results.append(travels)
    return [*results, travelling_gradient(of_parts, whole)]
