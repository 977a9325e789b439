"""From parallel degrees to the one mesh that is planned, and how batches lie on it.

The degrees only say what axes there are and how large: what is sharded along each is the plan's to
say. With experts over ``ep``, the data-parallel ranks are two axes, (efsdp, ep), as in torchtitan's
mesh for experts; batches go over both.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torchtitan.distributed import ParallelDims

from gt_config import ExpertPlacement

_DENSE_AXES = ("dp_replicate", "fsdp", "tp")
_EXPERT_AXIS = "ep"
_EXPERT_AXES = ("dp_replicate", "efsdp", _EXPERT_AXIS)
_WITHOUT_DATA = ("tp",)


def planned_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The mesh of all axes of more than one rank.

    Args:
        parallel_dims: without pipeline and context parallelism, and with tensor or expert
            parallelism, not both; of at least two ranks.
    """
    axes = _EXPERT_AXES if parallel_dims.ep_enabled else _DENSE_AXES
    sizes = {
        "dp_replicate": parallel_dims.dp_replicate,
        "fsdp": parallel_dims.dp_shard,
        "tp": parallel_dims.tp,
        "efsdp": parallel_dims.dp_shard // parallel_dims.ep,
        "ep": parallel_dims.ep,
    }
    present = [axis for axis in axes if sizes[axis] > 1]
    return parallel_dims.get_mesh(present if len(present) > 1 else present[0])


def batch_layout(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """How torchtitan's data loaders lay out a batch: over all axes but tensor parallelism's."""
    names = mesh.mesh_dim_names
    assert names is not None
    return tuple(Replicate() if name in _WITHOUT_DATA else Shard(0) for name in names)


def expert_layouts(experts: ExpertPlacement, mesh: DeviceMesh) -> dict[str, dict[str, Placement]]:
    """What ``gt_autoparallel.Constraints`` calls the demand of a run on routed experts.

    Args:
        experts: as asked for; ``"expert_parallel"`` only with a mesh that has their axis.
        mesh: the planned one.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    match experts:
        case "any":
            return {}
        case "expert_parallel":
            return {"*": {_EXPERT_AXIS: Shard(0)}}
        case "own_tokens":
            return {"*": dict.fromkeys(names, Replicate())}


def num_batch_shards(mesh: DeviceMesh) -> int:
    """Into how many parts a batch is cut."""
    count = 1
    for axis, placement in enumerate(batch_layout(mesh)):
        count *= mesh.size(axis) if isinstance(placement, Shard) else 1
    return count
