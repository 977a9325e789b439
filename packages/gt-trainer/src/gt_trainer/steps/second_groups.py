"""The groups that passes move collectives to, made where all ranks still do the same.

Else a rank whose capture fails would leave the others waiting for it to join a group.
"""

from __future__ import annotations

import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from gt_config import CompileConfig
from gt_passes import GroupPurpose, second_group_of
from gt_trainer._torch_internals import process_group_named


def create_second_groups(
    options: CompileConfig, parallel_dims: ParallelDims
) -> dict[str, dist.ProcessGroup]:
    """The second groups that ``options`` ask for, by labels such as "reductions of fsdp".

    Labels and their order are the same on every rank.
    """
    wanted: list[tuple[str, GroupPurpose]] = []
    if options.fsdp_second_group:
        # A plan reduces gradients over any axis, and in a pipeline each stage over others.
        further = ("dp_replicate", "tp", "ep") if options.autoparallel else ()
        wanted += [(axis, "reductions") for axis in ("fsdp", "efsdp", *further)]
    if options.ep_overlap.enabled:
        wanted += [("ep", "exchanges")]
    return {
        f"{purpose} of {axis}": process_group_named(
            second_group_of(mesh.get_group().group_name, purpose=purpose)
        )
        for axis, purpose in wanted
        if (mesh := parallel_dims.get_optional_mesh(axis)) is not None
    }
