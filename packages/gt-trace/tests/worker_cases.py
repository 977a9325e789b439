"""Functions that the tests of ``gt_trace.testing`` let workers run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def sum_of_ranks(factor: int) -> tuple[int, int, int]:
    """Rank, process and the sum of all ranks, times ``factor``."""
    total = torch.tensor([dist.get_rank() * factor])
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), int(total)


def fail_on(rank: int) -> None:
    """Raise on that rank, while the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise LookupError("what this rank missed")
    dist.barrier()


def exit_on(rank: int, code: int) -> None:
    """Let that rank's process end, while the others wait for it in a collective."""
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def system_exit() -> None:
    """Ask Python to exit, which a test must not take for success."""
    sys.exit(0)


def sleep_on(rank: int, seconds: float) -> None:
    """Take too long on that rank."""
    if dist.get_rank() == rank:
        time.sleep(seconds)


def unpicklable() -> Callable[[], None]:
    """Return what cannot travel to the caller."""
    return lambda: None


def threads() -> tuple[int, bool]:
    """Compute threads, and whether gloo is what connects the ranks."""
    return torch.get_num_threads(), dist.get_backend() == "gloo"


def is_imported(name: str) -> bool:
    return name in sys.modules
