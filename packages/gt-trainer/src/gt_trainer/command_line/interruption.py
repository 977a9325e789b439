"""Ctrl-C and SIGQUIT while nothing runs: one message, at once.

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
    """Inside, Ctrl-C ends the process with status 130, and SIGQUIT with 131; unless ignored."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT)}
    # None: from outside Python, and could not be put back
    ours = {n: each for n, each in previous.items() if each not in (signal.SIG_IGN, None)}
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, each in ours.items():
            signal.signal(number, each)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    try:
        what = b"interrupted" if number == signal.SIGINT else b"ended by SIGQUIT"
        os.write(2, b"gt-train: " + what + b"\n")
    finally:
        os._exit(128 + number)
