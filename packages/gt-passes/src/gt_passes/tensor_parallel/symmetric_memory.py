"""Whether the ranks of a group can read each other's memory, which async tensor parallelism needs.

An object that passes ask, so that what they do is tested on machines without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gt_passes._torch_compilation_internals import symmetric_memory_backend
from gt_passes._torch_internals import torch_group_ranks


class SymmetricMemory(Protocol):
    """Knows which groups have symmetric memory."""

    def reason_against(self, group_name: str) -> str | None:
        """Why a group cannot use symmetric memory, in words; None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class SymmetricMemoryHere:
    """What this process sees of this machine; all of them see the same."""

    def reason_against(self, group_name: str) -> str | None:
        """Ask CUDA and torch's registry of groups."""
        if not torch.cuda.is_available():
            return "this machine has no CUDA"
        ranks = torch_group_ranks(group_name)
        if ranks is None:
            return f"this process knows no group {group_name!r}"
        num_devices = torch.cuda.device_count()
        if (reason := _reason_of_hosts(group_name, ranks, num_devices)) is not None:
            return reason
        here = torch.cuda.current_device()
        others = [rank % num_devices for rank in ranks if rank % num_devices != here]
        unreachable = [n for n in others if not torch.cuda.can_device_access_peer(here, n)]
        if unreachable:
            return f"GPU {here} cannot access the memory of GPU {unreachable[0]}"
        if symmetric_memory_backend(torch.device("cuda", here)) is None:
            return "this PyTorch has no allocator of symmetric memory for CUDA"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricMemoryOnPaper:
    """That of a machine which is told of: among the GPUs of a host."""

    gpus_per_node: int

    def reason_against(self, group_name: str) -> str | None:
        """Ask torch's registry of groups; ranks fill hosts in order."""
        ranks = torch_group_ranks(group_name)
        if ranks is None:
            return f"this process knows no group {group_name!r}"
        return _reason_of_hosts(group_name, ranks, self.gpus_per_node)


def _reason_of_hosts(group_name: str, ranks: Sequence[int], num_devices: int) -> str | None:
    hosts = {rank // num_devices for rank in ranks}
    if len(hosts) == 1:
        return None
    return (
        f"the group {group_name!r} spans {len(hosts)} hosts of {num_devices} GPUs, and "
        "symmetric memory is that of one"
    )
