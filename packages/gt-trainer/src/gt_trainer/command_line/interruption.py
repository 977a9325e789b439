"""Ctrl-C while nothing runs: one message, at once.

Raising ``KeyboardInterrupt`` out of whatever is being imported is no way to end: callbacks and
``except`` clauses in foreign modules swallow it, and the run goes on, or trip over it. Before ranks
are started and after they have ended there is nothing to put in order: the process simply ends.

Loads nothing: it is in force before anything else of this package is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process with status 130; unless the process ignores it."""
    previous = signal.getsignal(signal.SIGINT)
    if previous in (signal.SIG_IGN, None):  # None: from outside Python, and could not be put back
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, b"gt-train: interrupted\n")
    finally:
        os._exit(128 + number)
