"""What happens inside one forked rank, from the fork to its end.

A rank leads a process group of its own: the terminal's Ctrl-C then reaches the supervisor alone,
which gives one message instead of one per rank, and ending the group ends what the rank started
too. It dies with its supervisor, however that dies. A rank that fails says so in a report that the
supervisor reads, and prints nothing itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from gt_trainer.launcher.stop import RunStoppedError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_POLL_SECONDS = 1.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The exception that ended a rank."""

    summary: str
    """Its type and the first line of its text; the whole text of a ``RunStoppedError``."""

    traceback: str
    """The whole traceback, as Python prints it; empty for a ``RunStoppedError``."""

    moment: float
    """When it left the rank's work, in seconds of the system-wide monotonic clock."""

    is_connection_error: bool
    """Whether it only says that another rank went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The work of one rank; called in the forked child.

    Its report goes to a file instead of a pipe, so that a long traceback cannot block the rank.
    """

    run: Callable[[], None]
    rank: int
    environment: Mapping[str, str]
    log_file: Path | None
    """Where its output goes; None leaves it on the supervisor's."""
    report_file: IO[bytes]
    supervisor_pid: int
    num_threads: int | None
    """OpenMP threads of the rank; None leaves what the environment says."""

    def __call__(self) -> None:
        """Do the work; on failure write the report and end with status 1, at once."""
        os.setpgid(0, 0)
        die_with(self.supervisor_pid)
        _restore_signals()
        os.environ.update(self.environment)
        if self.log_file is not None:
            _send_output_to(self.log_file)
        faulthandler.enable(file=2)  # a crash in native code then shows its Python stack
        try:
            self._use_threads()
            _check_cuda_survived_fork()
            self.run()
        except SystemExit as request:
            if request.code in (None, 0):
                return
            self._fail(request)
        except BaseException as error:  # noqa: BLE001  # also a KeyboardInterrupt sent to this rank
            self._fail(error)

    def _use_threads(self) -> None:
        if self.num_threads is None:
            return
        os.environ["OMP_NUM_THREADS"] = str(self.num_threads)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self.num_threads)

    def _fail(self, error: BaseException) -> NoReturn:
        moment = time.monotonic()
        report = {
            "summary": _summary(error),
            "traceback": _traceback(error),
            "moment": moment,
            "is_connection_error": _is_connection_error(error),
        }
        self.report_file.write(json.dumps(report).encode())
        self.report_file.flush()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # No clean-up that could wait for ranks which are waiting for this one.
        os._exit(1)


def read_report(report_file: IO[bytes]) -> RankReport | None:
    """Read the report of a rank that has ended; None if it ended without one."""
    report_file.seek(0)
    content = report_file.read()
    try:
        fields = json.loads(content)
    except ValueError:  # empty, or the rank was killed while it wrote
        return None
    return RankReport(**fields)


def _traceback(error: BaseException) -> str:
    if isinstance(error, RunStoppedError):
        return ""
    # The outermost frame is that of the rank's own work, which tells a reader nothing.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames))


def _summary(error: BaseException) -> str:
    if isinstance(error, RunStoppedError):
        return str(error)
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name


def _is_connection_error(error: BaseException) -> bool:
    """Say whether the error means that a peer is gone: a consequence, hardly ever the cause."""
    if isinstance(error, ConnectionError):
        return True
    if type(error).__name__ in {"DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    text = str(error)
    return any(sign in text for sign in ("Connection closed by peer", "Connection reset by peer"))


def die_with(supervisor_pid: int) -> None:
    """Arrange that the end of its parent, SIGKILL included, ends this process too.

    Args:
        supervisor_pid: of the parent, which may have ended already.
    """
    if not _set_parent_death_signal():
        threading.Thread(target=_poll_parent, args=(supervisor_pid,), daemon=True).start()
    if os.getppid() != supervisor_pid:  # it died before the arrangement was made
        os._exit(1)


def _set_parent_death_signal() -> bool:
    """Ask the kernel (Linux, prctl(2)) for SIGKILL when the parent ends."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _poll_parent(supervisor_pid: int) -> None:
    while os.getppid() == supervisor_pid:
        time.sleep(_PARENT_POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _restore_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Its group is in the background of the terminal, where writing may otherwise stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _send_output_to(log_file: Path) -> None:
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        # Under a test runner these may be replaced by something else.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _check_cuda_survived_fork() -> None:
    if "torch" not in sys.modules:
        return
    from gt_trainer._torch_internals import is_cuda_lost_by_fork

    if is_cuda_lost_by_fork():
        raise RuntimeError(
            "the parent of this rank initialised the CUDA driver before it forked, so this rank "
            "cannot use it: leave PYTORCH_NVML_BASED_CUDA_CHECK=1, or start with torchrun "
            "--nproc-per-node N -m gt_trainer"
        )
