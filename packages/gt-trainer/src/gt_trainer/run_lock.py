"""One run at a time writes to a folder.

Two would write the same checkpoints and lines of metrics. The lock is the system's: it goes with
the process that holds it, however that ends, so that nothing has to be deleted after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from torchtitan.tools.logging import logger

from gt_trainer.launcher import RunStoppedError

_LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_PATIENCE_SECONDS = 5.0
"""For who only asks, and for what a killed run started and has not ended yet."""


class FolderInUseError(RunStoppedError):
    """Another run writes to this one's folder, or it cannot be known that none does."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made if missing.

    Where the file system has no locks nothing is held, and the log says so.

    Raises:
        FolderInUseError: Another process holds it, or its lock is no file that can be opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / _LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise FolderInUseError(
            f"the lock of the run, {folder / _LOCK_FILE}, cannot be opened "
            f"({error.strerror or error}); move it away, or choose another --dump_folder"
        ) from None
    with opened as file:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FolderInUseError(
                        f"{_words(folder)}; wait for it, or choose another --dump_folder"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    f"{folder} cannot be locked ({error.strerror}): see to it yourself that no "
                    "other run writes to it"
                )
                break
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
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return None


def _words(folder: Path) -> str:
    who = (folder / _LOCK_FILE).read_text(encoding="utf-8", errors="replace").strip()
    return f"another run writes to {folder.absolute()}: {who or 'just started'}"
