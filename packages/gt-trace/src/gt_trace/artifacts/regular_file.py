"""Open files whose kind and size are not known before: no pipe is waited for, no device is read.

Imports no torch.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

MAX_BYTES = 2**28
"""The most bytes that ``read_regular`` reads."""


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read, unbuffered.

    Raises:
        OSError: It cannot be read, or is another kind of file.
    """
    # Without O_NONBLOCK a named pipe would hold us here.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return all bytes of a regular file.

    Raises:
        OSError: It cannot be read, is another kind of file, or has more than ``MAX_BYTES``.
    """
    with open_regular(path) as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        if num_bytes > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has {num_bytes:,} bytes, more than {MAX_BYTES:,}")
        return stream.readall()
