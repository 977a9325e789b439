"""A function that runs in a forked child, so that whatever it leaves behind ends with it.

Unlike the ranks of ``--nproc``, a child may be forked from a process with further threads, such as
those that ``torchrun`` starts in a rank. What they hold at that moment nobody gives back in the
child (``fork_safety``). So it runs for a limited time.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from gt_trainer.launcher.rank_process import die_with

ResultT = TypeVar("ResultT")


class ChildFailedError(RuntimeError):
    """What a child raised, in words, or how it ended."""


class ChildTimedOutError(ChildFailedError):
    """A child was not done in time."""


def run_in_child(function: Callable[[], ResultT], *, timeout_seconds: float) -> ResultT:
    """Call ``function`` in a child of this process, and wait for what it returns.

    Args:
        function: Its result can be pickled.
        timeout_seconds: After which the child is killed.

    Raises:
        ChildFailedError: It raised; the text is the child's traceback. Or the child was killed.
        ChildTimedOutError: It took too long.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(function, sender, os.getpid()), daemon=True)
    with warnings.catch_warnings():
        # Python's of forks from a process with threads: the time limit is what is done about them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    if not receiver.poll(timeout_seconds):
        child.kill()
        child.join()
        raise ChildTimedOutError(f"it was not done after {timeout_seconds:g} s")
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        child.join()
        raise ChildFailedError(f"a child process ended with status {child.exitcode}") from None
    child.join()
    if not succeeded:
        raise ChildFailedError(value)
    result: ResultT = value
    return result


def _run(function: Callable[[], object], sender: Connection, parent_pid: int) -> None:
    import torch

    # Else it would hold what a killed parent held, such as the lock of a run's folder.
    die_with(parent_pid)
    torch.set_num_threads(1)  # OpenMP's threads, if there were any, were not forked
    try:
        sender.send((True, function()))
    except Exception:  # noqa: BLE001  # whatever it is, the parent waits for it
        sender.send((False, traceback.format_exc()))
