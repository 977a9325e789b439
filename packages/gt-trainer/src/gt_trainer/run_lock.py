"""One run at a time writes to a folder.

Two would write the same checkpoints and lines of metrics. The lock is the system's: it goes with
the process that holds it, however that ends, so that nothing has to be deleted after a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from gt_trainer.launcher import RunStoppedError

_LOCK_FILE = "run.lock"


class FolderInUseError(RunStoppedError):
    """Another run writes to this one's folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made if missing.

    Raises:
        FolderInUseError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(
                f"{_words(folder)}; wait for it, or choose another --dump_folder"
            ) from None
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")
        file.flush()
        yield


def use_of(folder: Path) -> str | None:
    """Say who holds a run's folder; None if nobody does. Another run may take it a moment later."""
    path = folder / _LOCK_FILE
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _words(folder)
    return None


def _words(folder: Path) -> str:
    who = (folder / _LOCK_FILE).read_text().strip()
    return f"another run writes to {folder.absolute()}: {who or 'just started'}"
