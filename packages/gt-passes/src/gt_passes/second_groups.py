"""Second process groups: the same ranks, another communicator."""

from __future__ import annotations

import torch.distributed as dist

from gt_passes._torch_internals import torch_group_ranks

__all__ = ["second_group_of"]

_second: dict[str, str] = {}


def second_group_of(group_name: str) -> str:
    """The name of a second group of the same ranks; created when first asked for.

    All ranks of the group must ask together, and for several groups in the same order.

    Args:
        group_name: of a process group of this process.

    Raises:
        ValueError: no such group.
    """
    ranks = torch_group_ranks(group_name)
    if ranks is None:
        raise ValueError(f"{group_name!r} is not a process group of this process")
    known = _second.get(group_name)
    # Groups are gone once torch.distributed was shut down; names come back with others.
    if known is None or torch_group_ranks(known) != ranks:
        group = dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc=f"second of {group_name}"
        )
        assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
        known = _second[group_name] = group.group_name
    return known
