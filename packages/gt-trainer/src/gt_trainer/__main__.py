"""The program ``gt-train``, which ``python -m gt_trainer`` is too.

What is here is in force before anything else of this package is imported, and loads nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import locale
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO


def main() -> int:
    """Run ``gt-train`` on the arguments of this process, and return the exit status.

    Modules of the current folder can be imported, as by ``python -m``.
    """
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _be_in_utf8()
    make_streams_safe()
    with ending_at_once():
        from gt_trainer.command_line import cli

        return cli.main()


def _be_in_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding.

    PyTorch and torchtitan read and write text, and names of folders, in the encoding of the locale.
    """
    if locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


# Ctrl-C and SIGQUIT while nothing runs: one message, at once.
#
# Raising KeyboardInterrupt out of whatever is being imported is no way to end: callbacks and except
# clauses in foreign modules swallow it, and the run goes on, or trip over it. Before ranks are
# started and after they have ended there is nothing to put in order: the process simply ends.
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


# Standard output and error that never end a run: closed, without a reader, or for ASCII alone.
#
# ``gt-train ... | head -1`` closes the pipe while the run goes on, ``>&-`` closes the output before
# it, and in an ASCII locale a folder's name cannot be written as it is.
_NO_READER = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader has ended, and of a terminal that is gone."""


def make_streams_safe() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``; what cannot be shown is dropped or escaped."""
    for descriptor in (0, 1, 2):  # a file that is opened later must get none of these
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _safe(sys.stdout, 1)
    sys.stderr = _safe(sys.stderr, 2)


class _DroppedWithoutReader(io.FileIO):
    """A descriptor that becomes the null device when its reader is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_READER:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def _safe(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:
        stream.flush()
    raw = _DroppedWithoutReader(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=descriptor == 2 or raw.isatty(),
    )


if __name__ == "__main__":
    sys.exit(main())
