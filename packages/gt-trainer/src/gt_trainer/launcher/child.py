"""A function that runs in a forked child, so that whatever it leaves behind ends with it.

Unlike the ranks of ``--nproc``, a child may be forked from a process with further threads, such as
those that ``torchrun`` starts in a rank. What they hold at that moment nobody gives back in the
child (``fork_safety``). So it runs for a limited time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from gt_trainer.launcher.rank_process import die_with

ResultT = TypeVar("ResultT")

_LINES_OF_REASON = 2
"""A first line often announces what the second says; the last ones are often hints."""


class ChildFailedError(RuntimeError):
    """What a child raised, in words, or how it ended.

    Args:
        text: all of it.
        reason: the exception and what its text begins with, in one line; None for ``text``.
    """

    def __init__(self, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.reason = text if reason is None else reason


class ChildTimedOutError(ChildFailedError):
    """A child was not done in time."""


class RunningChild(Generic[ResultT]):
    """A child of this process that calls a function.

    Args:
        function: Its result can be pickled.
    """

    def __init__(self, function: Callable[[], ResultT]) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver: Connection
        self.receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(function, sender, os.getpid()), daemon=True
        )
        with warnings.catch_warnings():
            # Python's of forks from a process with threads, for which its time is limited.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        sender.close()

    def result(self) -> ResultT:
        """Wait for what the function returns.

        Raises:
            ChildFailedError: It raised; the text is the child's traceback. Or the child was killed.
        """
        try:
            succeeded, value = self.receiver.recv()
        except EOFError:
            self._process.join()
            status = self._process.exitcode
            raise ChildFailedError(f"a child process ended with status {status}") from None
        self._process.join()
        if not succeeded:
            raise ChildFailedError(*value)
        result: ResultT = value
        return result

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()


def run_in_child(function: Callable[[], ResultT], *, timeout_seconds: float) -> ResultT:
    """Call ``function`` in a child of this process, and wait for what it returns.

    Args:
        function: Its result can be pickled.
        timeout_seconds: After which the child is killed.

    Raises:
        ChildFailedError: As ``RunningChild.result``.
        ChildTimedOutError: It took too long.
    """
    child = RunningChild(function)
    if not child.receiver.poll(timeout_seconds):
        child.kill()
        raise ChildTimedOutError(f"it was not done after {timeout_seconds:g} s")
    return child.result()


def _run(function: Callable[[], object], sender: Connection, parent_pid: int) -> None:
    import torch

    # Else it would hold what a killed parent held, such as the lock of a run's folder.
    die_with(parent_pid)
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all of a group: its parent tells of it
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # OpenMP's threads, if there were any, were not forked
    try:
        sender.send((True, function()))
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent waits for it
        sender.send((False, (traceback.format_exc(), _reason(error))))


def _reason(error: Exception) -> str:
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return " ".join(map(str.strip, lines[:_LINES_OF_REASON]))
