"""From parallel degrees to the one mesh that is planned, and how batches lie on it.

The degrees only say what axes there are and how large: what is sharded along each is the plan's to
say. With experts over ``ep``, the data-parallel ranks are two axes, (efsdp, ep), as in torchtitan's
mesh for experts; batches go over both. With tensor parallelism too, experts are over its ranks
first, as there. Then either an exchange of tokens is among more ranks than these, which are two
axes, (dp_shard_in_ep, tp_in_ep); or among fewer, and they are two, (tp_mod_ep, tp_in_ep).

Where two axes cut one dim, the first one cuts first, and the last can be gathered alone. So the
axes of tensor and expert parallelism come first: parameters are cut for them, and then sharded over
the data-parallel ranks along the same dim, whose pieces lie in memory as collectives want them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils as titan_utils

from gt_autoparallel import MeshShape
from gt_config import ExpertPlacement

_TENSOR_PARALLEL_AXES = ("tp", "tp_mod_ep", "tp_in_ep")
_EXPERT_PARALLEL_AXES = ("ep", "dp_shard_in_ep", "tp_in_ep")
_CUT_COMPUTATION = {*_TENSOR_PARALLEL_AXES, *_EXPERT_PARALLEL_AXES}
_OURS = ("dp_shard_in_ep", "tp_mod_ep", "tp_in_ep")
"""Axes that torchtitan's meshes do not have."""

_SEQUENCE = Shard(1)


def planned_axes(*, dp_replicate: int, dp_shard: int, tp: int, ep: int) -> MeshShape:
    """The axes of more than one rank, with the strides that torchtitan's order of ranks gives them.

    Args:
        dp_replicate: of these degrees at least one is above 1.
        dp_shard: times ``tp`` a multiple of ``ep``.
        tp: a multiple of ``ep``, or a factor of it.
        ep: see ``dp_shard`` and ``tp``.
    """
    sizes = {"dp_replicate": dp_replicate, **_axes_in_a_replica(dp_shard, tp, ep)}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed(sizes):
        strides[name] = stride
        stride *= sizes[name]
    present = sorted(sizes, key=lambda name: name not in _CUT_COMPUTATION)
    return MeshShape(
        names=tuple(present),
        sizes=tuple(sizes[name] for name in present),
        strides=tuple(strides[name] for name in present),
    )


def _axes_in_a_replica(dp_shard: int, tp: int, ep: int) -> dict[str, int]:
    """In torchtitan's order of ranks: neighboring ones differ along the last."""
    if ep == 1:
        return {"fsdp": dp_shard, "tp": tp}
    if tp == 1:
        return {"efsdp": dp_shard // ep, "ep": ep}
    if ep <= tp:
        return {"fsdp": dp_shard, "tp_mod_ep": tp // ep, "tp_in_ep": ep}
    in_ep = ep // tp
    return {"efsdp": dp_shard // in_ep, "dp_shard_in_ep": in_ep, "tp_in_ep": tp}


def planned_shape(parallel_dims: ParallelDims) -> MeshShape:
    """``planned_axes`` of a run."""
    return planned_axes(
        dp_replicate=parallel_dims.dp_replicate,
        dp_shard=parallel_dims.dp_shard,
        tp=parallel_dims.tp,
        ep=parallel_dims.ep,
    )


def planned_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The mesh of ``planned_axes``, of the run's own process groups where it has them.

    In a pipeline it is that of a stage's ranks. Every rank has to call it, once.

    Args:
        parallel_dims: without context parallelism, of at least two ranks beside the pipeline's.
    """
    shape = planned_shape(parallel_dims)
    is_turned = shape.num_axes > 1 and shape.names[0] in _CUT_COMPUTATION
    if not is_turned and not {*_OURS}.intersection(shape.names):
        return parallel_dims.get_mesh(list(shape.names))
    of_first_stage = torch.tensor(shape.ranks_of_axes(range(shape.num_axes))).view(shape.sizes)
    ranks = of_first_stage + dist.get_rank() // shape.num_ranks * shape.num_ranks
    groups = [_group(parallel_dims, shape, axis, ranks) for axis in range(shape.num_axes)]
    return DeviceMesh.from_group(groups, titan_utils.device_type, ranks, mesh_dim_names=shape.names)


def _group(
    parallel_dims: ParallelDims, shape: MeshShape, axis: int, ranks: torch.Tensor
) -> dist.ProcessGroup:
    """This rank's along an axis."""
    name = shape.names[axis]
    if name not in _OURS:
        return parallel_dims.get_mesh(name).get_group()
    if name == "tp_in_ep" and shape.sizes[axis] == parallel_dims.tp:
        return parallel_dims.get_mesh("tp").get_group()
    lines = ranks.movedim(axis, -1).reshape(-1, shape.sizes[axis])
    (own,) = (line.tolist() for line in lines if dist.get_rank() in line)
    group = dist.new_group(own, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return group


def batch_layout(mesh: MeshShape) -> tuple[Placement, ...]:
    """How torchtitan's data loaders lay out a batch: not over the axes of tensor parallelism."""
    return tuple(Replicate() if name in _TENSOR_PARALLEL_AXES else Shard(0) for name in mesh.names)


def token_layout(mesh: MeshShape, seq_len: int) -> tuple[Placement, ...]:
    """How what is computed of each token lies: hidden states between stages, and logits.

    Samples over axes of data, as batches, and the tokens of a sample over those of tensor
    parallelism; on each rank of an axis that does not divide them.

    Args:
        mesh: that is planned.
        seq_len: tokens of a sample.
    """
    layout: list[Placement] = []
    for placement, size in zip(batch_layout(mesh), mesh.sizes, strict=True):
        is_cut = isinstance(placement, Replicate) and seq_len % size == 0
        seq_len //= size if is_cut else 1
        layout.append(_SEQUENCE if is_cut else placement)
    return tuple(layout)


def local_token_shape(
    mesh: MeshShape, seq_len: int, *, num_samples: int, width: int
) -> tuple[int, int, int]:
    """What one rank has of it: (b, L, D), of which the sequence may be cut.

    Args:
        mesh: that is planned.
        seq_len: tokens of a sample.
        num_samples: of one rank.
        width: numbers of a token.
    """
    for placement, size in zip(token_layout(mesh, seq_len), mesh.sizes, strict=True):
        if placement == _SEQUENCE:
            seq_len //= size
    return num_samples, seq_len, width


def expert_layouts(experts: ExpertPlacement, mesh: MeshShape) -> dict[str, dict[str, Placement]]:
    """What ``gt_autoparallel.Constraints`` calls the demand of a run on routed experts.

    Args:
        experts: as asked for; ``"expert_parallel"`` only with a mesh that has such axes.
        mesh: the planned one.
    """
    match experts:
        case "any":
            return {}
        case "expert_parallel":
            axes = (name for name in mesh.names if name in _EXPERT_PARALLEL_AXES)
            return {"*": dict.fromkeys(axes, Shard(0))}
        case "own_tokens":
            return {"*": dict.fromkeys(mesh.names, Replicate())}


def expert_token_layouts(mesh: MeshShape) -> dict[str, tuple[Placement, ...]]:
    """Which tokens each rank routes to experts, as ``gt_autoparallel.Constraints`` has it.

    Torchtitan balances routing by the tokens that each expert got, which it sums over data-parallel
    ranks, and with expert parallelism over those of tensor parallelism too: each then has a part of
    the sequence. Else all of them route the same tokens.
    """
    has_expert_parallelism = any(name in _EXPERT_PARALLEL_AXES for name in mesh.names)
    of_tensor_parallel = _SEQUENCE if has_expert_parallelism else Replicate()
    layout = (
        of_tensor_parallel if name in _TENSOR_PARALLEL_AXES else placement
        for name, placement in zip(mesh.names, batch_layout(mesh), strict=True)
    )
    return {"*": tuple(layout)}


def num_batch_shards(mesh: MeshShape) -> int:
    """Into how many parts a batch is cut."""
    return math.prod(
        size
        for size, placement in zip(mesh.sizes, batch_layout(mesh), strict=True)
        if isinstance(placement, Shard)
    )
