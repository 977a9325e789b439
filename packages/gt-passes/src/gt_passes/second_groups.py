"""Second process groups: the same ranks, another communicator, for one purpose each.

A communicator runs one collective at a time, so what shall not queue behind each other needs
groups of its own, also where two mesh axes are one group: FSDP's and the experts', if each rank
holds other experts.

On NCCL they run on streams of high priority: the device then starts the few blocks of a collective
before those that wait of a large matrix product launched earlier, not behind them all.
"""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from gt_passes._torch_internals import torch_group_description, torch_group_ranks

GroupPurpose = Literal["reductions", "exchanges"]
"""What a second group is for: gradient reductions, or token exchanges."""

_second: dict[tuple[str, GroupPurpose], str] = {}


def second_group_of(group_name: str, *, purpose: GroupPurpose) -> str:
    """The name of another group of the same ranks; created when first asked for.

    On NCCL its stream has high priority. All ranks of the group must ask together, and for several
    groups in the same order.

    Args:
        group_name: of a process group of this process.
        purpose: there is one group for each.

    Raises:
        ValueError: no such group.
    """
    ranks = torch_group_ranks(group_name)
    if ranks is None:
        raise ValueError(f"{group_name!r} is not a process group of this process")
    known = _second.get((group_name, purpose))
    description = f"gt_passes: {purpose} of {group_name}"
    # Groups are gone once torch.distributed was shut down; their names come back for others.
    is_there = known is not None and torch_group_description(known) == description
    if known is None or not is_there or torch_group_ranks(known) != ranks:
        group = dist.new_group(
            list(ranks),
            pg_options=_high_priority(),
            use_local_synchronization=True,
            group_desc=description,
        )
        assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
        known = _second[group_name, purpose] = group.group_name
    return known


def _high_priority() -> object | None:
    """Options of a new group on the default group's backend; None if that has no streams."""
    if "nccl" not in dist.get_backend():
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def second_reduction_group(group_name: str) -> str:
    """``second_group_of`` for gradient reductions."""
    return second_group_of(group_name, purpose="reductions")


def second_exchange_group(group_name: str) -> str:
    """``second_group_of`` for token exchanges."""
    return second_group_of(group_name, purpose="exchanges")
