"""Standard output and error that never end a run: closed, without a reader, or for ASCII alone.

``gt-train ... | head -1`` closes the pipe while the run goes on, ``>&-`` closes the output before
it, and in an ASCII locale a folder's name cannot be written as it is. Loads nothing else.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

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
