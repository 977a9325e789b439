"""The groups that passes move collectives to, made where all ranks still do the same.

Else a rank whose capture fails would leave the others waiting for it to join a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from gt_config import CompileConfig
from gt_passes import GroupPurpose, second_group_of
from gt_trainer._torch_internals import process_group_named
from gt_trainer.placement.placed_parts import exchange_groups, keeps_all_tokens, planned_groups


def create_second_groups(
    options: CompileConfig, parallel_dims: ParallelDims, parts: Sequence[nn.Module]
) -> dict[str, dist.ProcessGroup]:
    """The second groups that ``options`` ask for, by labels such as "reductions of fsdp".

    Labels and their order are the same on every rank.

    Args:
        options: of the run.
        parallel_dims: its meshes.
        parts: placed; of those that a solver placed, gradients may be reduced
            over any axis, and tokens exchanged over any axes.
    """
    wanted: list[tuple[str, GroupPurpose, dist.ProcessGroup]] = []
    if options.fsdp_second_group:
        groups = planned_groups(options, parts) or _groups(parallel_dims, "fsdp", "efsdp")
        wanted += [(axis, "reductions", group) for axis, group in groups.items()]
    if options.ep_overlap.enabled:
        if keeps_all_tokens(options, parts):
            logger.warning(
                "--compile.ep_overlap.enabled hides nothing: by its plan each rank keeps its "
                "tokens, and what runs in chunks waits for no exchange"
            )
        of_experts = (
            exchange_groups(options, parts)
            if options.autoparallel
            else _groups(parallel_dims, "ep")
        )
        wanted += [(axis, "exchanges", group) for axis, group in of_experts.items()]
    return {
        f"{purpose} of {axis}": process_group_named(
            second_group_of(group.group_name, purpose=purpose)
        )
        for axis, purpose, group in wanted
    }


def _groups(parallel_dims: ParallelDims, *axes: str) -> dict[str, dist.ProcessGroup]:
    """Of the axes that there are."""
    meshes = ((axis, parallel_dims.get_optional_mesh(axis)) for axis in axes)
    return {axis: mesh.get_group() for axis, mesh in meshes if mesh is not None}
