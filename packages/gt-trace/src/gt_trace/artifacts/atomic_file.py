"""Files that are complete or absent, whoever else writes and whenever the writer is killed.

Imports no torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gt_trace.errors import ArtifactError

TEMPORARY_PREFIX = ".writing-"
"""How files begin that are being written; one that stays was left by a writer that was killed."""

_ATTEMPTS = 100
_FILE_MODE = 0o644
_FOLDER_MODE = 0o755
"""What is stored can be written by its owner alone, whatever the umask: else no run would read it.
"""


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let ``path`` have what ``write`` writes, all of it, or leave it as it was.

    The file is written under another name in the same folder, brought to the disk, and renamed.
    The folder is made if missing.

    Args:
        path: what is written or replaced.
        write: writes to the open file that it is given. What it raises passes, other than errors
            of the operating system, and leaves nothing.

    Raises:
        ArtifactError: the operating system refused; the text has the path and the reason.
    """
    try:
        file, temporary = _open_beside(path)
        try:
            with file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error
    _bring_to_disk(path.parent)


def _open_beside(path: Path) -> tuple[BinaryIO, Path]:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64]
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{host}-{os.getpid()}-{os.urandom(8).hex()}")
    for attempts_left in reversed(range(_ATTEMPTS)):
        # Another job may find the folder empty and remove it, between these lines or within mkdir.
        try:
            _make_folder(path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return os.fdopen(os.open(temporary, flags, _FILE_MODE), "wb"), temporary
        except (FileNotFoundError, FileExistsError):
            if not attempts_left:
                raise
    raise AssertionError("the last attempt raises")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(_FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        _make_folder(folder.parent)
        folder.mkdir(_FOLDER_MODE, exist_ok=True)


def _bring_to_disk(folder: Path) -> None:
    # Some network file systems refuse this for folders. The file is complete without it; if then
    # the machine loses power, it may be absent.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
