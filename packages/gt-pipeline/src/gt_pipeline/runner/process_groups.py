"""Process groups of a runner: made for some ranks alone, closed under whoever waits, given back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# A receive that nobody sends to; no transfer of a schedule has this tag.
_UNUSED_TAG = 2**30


def make_group(
    ranks: Sequence[int],
    *,
    purpose: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup | None:
    """A group of some ranks. Every rank of the world makes every group, in the same order.

    ``use_local_synchronization``, which asks for the group's ranks only, is no way out: where ranks
    have made different numbers of groups before, it gives one group two names, and waits forever
    (2.15), or gives a name again whose addresses in the store are those of a group that is gone
    (2.13).

    Returns:
        The group, which PyTorch's logs call by its purpose; None on ranks that are not in it.
    """
    group = dist.new_group(list(ranks), backend=backend, timeout=timeout, group_desc=purpose)
    return group if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks else None


def close_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let every operation of a group fail, those under way and those to come.

    Gloo has no abort (``ProcessGroup.abort`` does nothing there), but when a receive times out it
    closes the connections of its whole group, so that the other ranks fail at once as well.
    Seen in 2.13.0, 2.14.1 and 2.15.0; without it, they would wait for the group's timeout.
    """
    if group.size() == 1:
        return
    if device.type != "cpu":
        group.abort()
        return
    rank = group.rank()
    for peer in range(group.size()):
        if peer == rank:
            continue
        # What fails here is what was asked for: a timeout, or a connection that is closed already.
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def release_group(group: dist.ProcessGroup) -> None:
    """Give a group back to torch.distributed; nothing may be under way in it."""
    with suppress(ValueError, AssertionError):  # the world may be gone already, and it with it
        dist.destroy_process_group(group)
