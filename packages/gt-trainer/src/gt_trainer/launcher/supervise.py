"""The supervisor: forks the ranks, waits, and when one fails or a signal comes, ends them all.

The rules, in the order of their importance:

- No process is left behind. Every rank leads its own process group; the group is killed when its
  rank ends, and a rank dies with the supervisor.
- One message. Ranks report instead of printing; when one fails the others usually fail too, because
  their peer is gone, and only the cause is shown.
- The exit status says what happened: 1 for a failure, 128 + n for signal n.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import IO

from gt_trainer.launcher.fork_safety import check_can_fork
from gt_trainer.launcher.rank_process import RankProcess, RankReport, read_report

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SETTLE_SECONDS = 1.0
_NUM_LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """How the ranks of one machine are to be run."""

    num_ranks: int
    environment: Callable[[int], Mapping[str, str]]
    """Variables to add to a rank's environment."""
    log_folder: Path
    """Existing folder for the output of ranks that are not shown: ``rank_N.log``."""
    shown_ranks: frozenset[int] = frozenset({0})
    """Ranks whose output stays on the supervisor's."""
    num_threads: int | None = None
    """OpenMP threads of each rank; None leaves what the environment says."""
    grace_seconds: float = 5.0
    """Time between SIGTERM and SIGKILL for a rank that does not end."""

    def log_file(self, rank: int) -> Path | None:
        """Return where the rank's output goes, None for a shown rank."""
        return None if rank in self.shown_ranks else self.log_folder / f"rank_{rank}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the ranks ended."""

    status: int
    """The exit status that says so: 0, 1, or 128 + signal."""
    message: str | None
    """What to tell the user; None if all went well."""
    is_accident: bool = False
    """Whether a rank died or raised, so that the same ranks may do better from where it was:
    nobody ended them, and no rank stopped by itself, with its reason."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A started rank. ``ended`` is the monotonic time at which its end was noticed."""

    number: int
    process: ForkProcess
    report_file: IO[bytes]
    log_file: Path | None
    log_start: int
    ended: float | None = None
    report: RankReport | None = None

    @property
    def exit_code(self) -> int:
        code = self.process.exitcode
        assert code is not None, "asked before the rank ended"
        return code

    @property
    def failed(self) -> bool:
        return self.ended is not None and self.exit_code != 0


@dataclass(slots=True)
class _Signals:
    """Signals that ask for the end, noted by a handler and waited for through a pipe."""

    read_end: int
    write_end: int
    ranks: list[_Rank]
    received: list[signal.Signals] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):  # full: whoever waits will wake anyway
            os.write(self.write_end, b".")

    def forget_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.read_end, 1024)

    def pause(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: stop the ranks, then this process; continue them when it is continued."""
        _signal_groups(self.ranks, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal_groups(self.ranks, signal.SIGCONT)


def run_ranks(
    run: Callable[[], None],
    *,
    plan: RankPlan,
    host: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Outcome:
    """Fork the ranks, run ``run`` in each, and wait until all have ended.

    Must be called on the main thread of a process that has no other thread. SIGINT, SIGTERM,
    SIGHUP and SIGQUIT end the ranks; a second one of them kills them at once.

    Args:
        run: The work of a rank; it finds its number in its environment.
        plan: How many ranks, and what surrounds them.
        host: What the supervisor provides while the ranks run, entered after the forks, so it may
            have threads.

    Returns:
        The outcome. Nothing has been printed.

    Raises:
        ForkUnsafeError: This process must not be forked.
    """
    check_can_fork()
    ranks: list[_Rank] = []
    with _noting_signals(ranks) as signals, contextlib.ExitStack() as stack:
        stack.callback(_kill_leftovers, ranks)
        _start(run, plan=plan, ranks=ranks, stack=stack)
        stack.enter_context(host())
        _wait_for_end(ranks, signals)
        if not signals.received:
            _settle(ranks, signals)
        # Whatever comes after this moment is a consequence of ending the ranks.
        outcome = _judge(ranks, plan=plan, signals=signals)
        _end(ranks, signals, plan.grace_seconds)
        if signals.received:  # also while ranks were being ended: somebody wants the end
            outcome = replace(outcome, is_accident=False)
    return outcome


@contextlib.contextmanager
def _noting_signals(ranks: list[_Rank]) -> Iterator[_Signals]:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signals = _Signals(read_end, write_end, ranks)
    handlers = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGTSTP)}
    # nohup ignores SIGHUP, for one; it knows why. None is a handler from outside Python.
    ours = {n: handler for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in ours:
        signal.signal(number, signals.pause if number == signal.SIGTSTP else signals.note)
    try:
        yield signals
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


def _start(
    run: Callable[[], None], *, plan: RankPlan, ranks: list[_Rank], stack: contextlib.ExitStack
) -> None:
    context = multiprocessing.get_context("fork")
    supervisor_pid = os.getpid()
    # Everything imported so far is shared with the ranks until someone writes to it, and a garbage
    # collection writes to all it visits.
    gc.freeze()
    stack.callback(gc.unfreeze)
    # A signal in the moment between a fork and the rank's own handlers would be lost in a handler
    # inherited from here.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        for number in range(plan.num_ranks):
            report_file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the stack
            stack.callback(report_file.close)
            log_file = plan.log_file(number)
            work = RankProcess(
                run=run,
                rank=number,
                environment=plan.environment(number),
                log_file=log_file,
                report_file=report_file,
                supervisor_pid=supervisor_pid,
                num_threads=plan.num_threads,
            )
            process = context.Process(target=work, name=f"rank {number}")
            log_start = log_file.stat().st_size if log_file and log_file.exists() else 0
            process.start()
            ranks.append(
                _Rank(
                    number=number,
                    process=process,
                    report_file=report_file,
                    log_file=log_file,
                    log_start=log_start,
                )
            )
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # The rank does this too; whoever is first.
                os.setpgid(_pid(process), _pid(process))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _wait_for_end(ranks: list[_Rank], signals: _Signals) -> None:
    """Return when all ranks have ended, when one has failed, or when a signal has come."""
    while not signals.received:
        running = [rank for rank in ranks if rank.ended is None]
        if not running:
            return
        wait([signals.read_end, *(rank.process.sentinel for rank in running)])
        _note_ended(running)
        if any(rank.failed for rank in ranks):
            return


def _settle(ranks: list[_Rank], signals: _Signals) -> None:
    """Give the rank that caused the failure a moment to report it.

    A rank whose peer is gone can be quicker to end than the peer itself, which may be closing files
    after its exception.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while all(_is_consequence(rank) for rank in ranks if rank.failed):
        running = [rank for rank in ranks if rank.ended is None]
        left = deadline - time.monotonic()
        if not running or left <= 0 or signals.received:
            return
        wait([signals.read_end, *(rank.process.sentinel for rank in running)], timeout=left)
        _note_ended(running)


def _end(ranks: list[_Rank], signals: _Signals, grace_seconds: float) -> None:
    """SIGTERM to every running rank's group; SIGKILL after the grace time, or at another signal."""
    num_signals = len(signals.received)
    signals.forget_wakeups()
    deadline = time.monotonic() + grace_seconds
    running = [rank for rank in ranks if rank.ended is None]
    _signal_groups(running, signal.SIGTERM)
    while running and len(signals.received) == num_signals:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([signals.read_end, *(rank.process.sentinel for rank in running)], timeout=left)
        _note_ended(running)
        running = [rank for rank in running if rank.ended is None]
    _kill_leftovers(ranks)


def _kill_leftovers(ranks: list[_Rank]) -> None:
    """SIGKILL whatever still runs, and wait for it."""
    running = [rank for rank in ranks if rank.ended is None]
    _signal_groups(running, signal.SIGKILL)
    for rank in running:
        rank.process.join()
        rank.ended = time.monotonic()


def _note_ended(running: list[_Rank]) -> None:
    ready = set(wait([rank.process.sentinel for rank in running], timeout=0))
    for rank in running:
        if rank.process.sentinel not in ready:
            continue
        # Before the rank is reaped, while its group's number cannot have been given to another.
        _signal_groups([rank], signal.SIGKILL)
        rank.process.join()
        rank.report = read_report(rank.report_file)
        rank.ended = rank.report.moment if rank.report else time.monotonic()


def _signal_groups(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(_pid(rank.process), number)


def _pid(process: ForkProcess) -> int:
    assert process.pid is not None, "asked before the process was started"
    return process.pid


def _is_consequence(rank: _Rank) -> bool:
    """Say whether a failed rank only suffered from another one's failure.

    SIGABRT counts: it is how C++ ends a rank whose communication broke.
    """
    if rank.report is not None:
        return rank.report.is_connection_error
    return rank.exit_code == -signal.SIGABRT


def _judge(ranks: list[_Rank], *, plan: RankPlan, signals: _Signals) -> Outcome:
    if signals.received:
        return _interrupted(signals.received[0], plan.num_ranks)
    failed = [rank for rank in ranks if rank.failed]
    if not failed:
        return Outcome(status=0, message=None)
    cause = min(failed, key=lambda rank: (_is_consequence(rank), rank.ended))
    outcome = _failure(cause, plan.num_ranks)
    stopped = [str(rank.number) for rank in ranks if rank.ended is None and _is_stopped(rank)]
    if not stopped:
        return outcome
    told = (
        f"{outcome.message}\n  rank {', '.join(stopped)} was stopped by a signal (SIGSTOP, say), "
        "and did not answer the others: start again, and let no signal stop a process of the run"
    )
    return replace(outcome, message=told)


def _is_stopped(rank: _Rank) -> bool:
    """Whether a signal has stopped a running rank; False where the system cannot tell."""
    if not hasattr(os, "waitid"):  # macOS
        return False
    with contextlib.suppress(ChildProcessError):
        how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, _pid(rank.process), how) is not None
    return False


def _interrupted(number: signal.Signals, num_ranks: int) -> Outcome:
    what = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    return Outcome(
        status=128 + number, message=f"gt-train: {what}; all {num_ranks} ranks were ended"
    )


def _failure(rank: _Rank, num_ranks: int) -> Outcome:
    name = f"gt-train: rank {rank.number} of {num_ranks}"
    rest = "the other ranks were ended" if num_ranks > 1 else "no other rank was running"
    log = f"\n  its output: {rank.log_file}" if rank.log_file else ""
    if rank.report is not None:
        return Outcome(
            status=1,
            message=f"{rank.report.traceback}{name} failed: {rank.report.summary}\n  {rest}{log}",
            is_accident=rank.report.traceback != "",
        )
    tail = _log_tail(rank)
    if rank.exit_code > 0:
        what = f"ended with status {rank.exit_code} and no exception"
        return Outcome(status=1, message=f"{tail}{name} {what}\n  {rest}{log}", is_accident=True)
    number = signal.Signals(-rank.exit_code)
    hint = " (the kernel does this when memory runs out)" if number == signal.SIGKILL else ""
    return Outcome(
        status=128 + number,
        message=f"{tail}{name} was killed by {number.name}{hint}\n  {rest}{log}",
        is_accident=True,
    )


def _log_tail(rank: _Rank) -> str:
    """Return the last lines that a rank without a report wrote to its log, if it has one."""
    if rank.log_file is None or not rank.log_file.exists():
        return ""
    with rank.log_file.open("rb") as log:
        log.seek(rank.log_start)
        lines = log.read().decode(errors="replace").splitlines()[-_NUM_LOG_LINES:]
    return "".join(f"{line}\n" for line in lines)
