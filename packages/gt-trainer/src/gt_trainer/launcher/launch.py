"""``launch``: the one function that the command line calls to run a training function.

The rendezvous of forked ranks cannot race for a port: the supervisor binds and listens before the
forks, and serves torch's key-value store on that very socket after them. The variable of torchrun's
agent makes the ranks use a store that is served for them. A store that torch serves itself listens
on all interfaces, and anybody may write to it. So a job on one host has its store on loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gt_trainer.launcher.rendezvous import LOOPBACK, Rendezvous
from gt_trainer.launcher.stop import RunStoppedError
from gt_trainer.launcher.supervise import Outcome, RankPlan, run_ranks

_LOOPBACK_NAMES = (LOOPBACK, "localhost")
_IS_STORE_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
_TERMINATING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How a run goes on by itself after a rank died or raised."""

    at_most: int
    prepare: Callable[[], bool]
    """Called when all ranks have ended: gets ready, and says whether they are to start again."""


def launch(
    run: Callable[[], None],
    *,
    num_ranks: int,
    log_folder: Path,
    rendezvous: Rendezvous | None = None,
    shown_ranks: Collection[int] = (0,),
    num_threads: int | None = None,
    restarts: Restarts | None = None,
    communicates: bool = True,
) -> int:
    """Run ``run`` on every rank that this process is responsible for, and wait.

    What goes wrong is printed to standard error, once.

    Args:
        run: The training. It finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the
            environment, as torchtitan expects.
        num_ranks: Ranks to run here. More than 1 forks, so everything heavy should be imported
            already, in a process prepared with ``prepare_environment``.
        log_folder: Folder for ``rank_N.log``, made if missing; used only when forking.
        rendezvous: The job that this process is a rank of; then ``num_ranks`` must be 1.
        shown_ranks: Forked ranks whose output goes to the terminal instead of a log.
        num_threads: OpenMP threads of each forked rank; None leaves it to the environment.
        restarts: How often forked ranks start again after one of them died; None for never.
        communicates: Whether a single rank makes process groups, for which a store is served.

    Returns:
        The exit status: 0; 1 if ``run`` failed; 128 + n after signal n.

    Raises:
        ForkUnsafeError: Ranks must not be forked from this process.
        ValueError: ``num_ranks`` is not positive, or contradicts ``rendezvous``; or the only rank,
            which runs in this process, is to start again.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, and must be at least 1")
    if rendezvous is not None and num_ranks != 1:
        raise ValueError(
            f"num_ranks is {num_ranks}, but this process is already rank {rendezvous.rank} of "
            f"{rendezvous.world_size} of a job started by {rendezvous.source}"
        )
    if restarts is not None and num_ranks == 1:
        raise ValueError("restarts are of forked ranks, and num_ranks is 1")
    if rendezvous is not None:
        if not rendezvous.is_on_one_host:
            return _run_here(run, rendezvous)
        with _loopback_for_gloo(), _store_of(rendezvous):
            return _run_here(run, rendezvous)
    if num_ranks == 1:
        store = _store_of_one() if communicates else contextlib.nullcontext(0)
        with contextlib.ExitStack() as stack:
            for number in _TERMINATING:
                stack.enter_context(_handling(number, _raise_terminated))
            stack.enter_context(_loopback_for_gloo())
            port = stack.enter_context(store)
            return _run_here(run, _local_rendezvous(0, world_size=1, port=port))
    starts = 0
    while True:
        outcome = _fork_and_wait(
            run,
            num_ranks=num_ranks,
            log_folder=log_folder,
            shown_ranks=frozenset(shown_ranks),
            num_threads=num_threads,
        )
        if outcome.message is not None:
            _tell(outcome.message)
        if restarts is None or not outcome.is_accident or starts == restarts.at_most:
            return outcome.status
        try:
            if not restarts.prepare():
                return outcome.status
        except (RunStoppedError, OSError) as error:
            _tell(f"gt-train: not started again: {error}")
            return outcome.status
        starts += 1
        _tell(f"gt-train: starting again, {starts} of --restarts {restarts.at_most}")


def _fork_and_wait(
    run: Callable[[], None],
    *,
    num_ranks: int,
    log_folder: Path,
    shown_ranks: frozenset[int],
    num_threads: int | None,
) -> Outcome:
    if not shown_ranks.issuperset(range(num_ranks)):
        log_folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server((LOOPBACK, 0), backlog=max(128, 2 * num_ranks)) as listener:
        port = listener.getsockname()[1]

        def environment(rank: int) -> dict[str, str]:
            rendezvous = _local_rendezvous(rank, world_size=num_ranks, port=port)
            return {**rendezvous.environment(), _IS_STORE_SERVED: "True"}

        with _loopback_for_gloo():
            return run_ranks(
                run,
                plan=RankPlan(
                    num_ranks=num_ranks,
                    environment=environment,
                    log_folder=log_folder,
                    shown_ranks=shown_ranks,
                    num_threads=num_threads,
                ),
                host=lambda: _serving_store(listener, port),
            )


def _local_rendezvous(rank: int, *, world_size: int, port: int) -> Rendezvous:
    return Rendezvous(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr=LOOPBACK,
        master_port=port,
        source="gt-train",
    )


@contextlib.contextmanager
def _store_of(rendezvous: Rendezvous) -> Iterator[None]:
    """Have the first rank of a job on one host serve the store on loopback, where its address is.

    An agent that serves the store already goes on to do so.
    """
    is_served = os.environ.get(_IS_STORE_SERVED) == "True"
    if is_served or rendezvous.master_addr not in _LOOPBACK_NAMES or rendezvous.master_port == 0:
        yield
        return
    with _using_served_store():
        if rendezvous.rank != 0:
            yield
            return
        with (
            socket.create_server((LOOPBACK, rendezvous.master_port)) as listener,
            _serving_store(listener, rendezvous.master_port),
        ):
            yield


@contextlib.contextmanager
def _store_of_one() -> Iterator[int]:
    """Serve the store of a job of one rank on loopback, at the port that is returned."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        with _using_served_store(), _serving_store(listener, port):
            yield port


@contextlib.contextmanager
def _using_served_store() -> Iterator[None]:
    """Let torch's ``env://`` connect to a store, on every rank, and serve none."""
    previous = os.environ.get(_IS_STORE_SERVED)
    os.environ[_IS_STORE_SERVED] = "True"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_IS_STORE_SERVED]
        else:
            os.environ[_IS_STORE_SERVED] = previous


@contextlib.contextmanager
def _serving_store(listener: socket.socket, port: int) -> Iterator[None]:
    """Serve torch's key-value store on the listening socket. Starts threads."""
    import torch.distributed

    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # public, re-exported untyped
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    yield
    del store


@contextlib.contextmanager
def _loopback_for_gloo() -> Iterator[None]:
    """Let gloo use the loopback interface: a machine's own name may resolve to nothing."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


class _TerminatedError(BaseException):
    """A signal that asks for the end, as an exception, so that ``finally`` clauses run."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _handling(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    previous = signal.getsignal(number)
    # Whoever ignores it knows why: a shell that started us in the background, say. None is a
    # handler from outside Python, which could not be put back.
    if previous in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _TerminatedError(number)


@dataclass(slots=True)
class _Interrupts:
    """Ctrl-C once ends the run in order; again, at once, wherever it is."""

    name: str
    asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        if self.asked:
            try:  # unbuffered: the signal may have come in the midst of a print
                if os.isatty(1):
                    os.write(1, f"{_SHOW_CURSOR}\n".encode())
                os.write(2, f"{self.name}: interrupted\n".encode())
            finally:
                os._exit(128 + number)
        self.asked = True
        raise KeyboardInterrupt


def _run_here(run: Callable[[], None], rendezvous: Rendezvous) -> int:
    """Run as one rank in this process, and turn what ends it into a message and a status."""
    os.environ.update(rendezvous.environment())
    name = "gt-train"
    if rendezvous.world_size > 1:
        name += f": rank {rendezvous.rank} of {rendezvous.world_size}"
    try:
        with _handling(signal.SIGINT, _Interrupts(name)):
            run()
    except KeyboardInterrupt:
        _tell(f"{name}: interrupted")
        return 128 + signal.SIGINT
    except _TerminatedError as error:
        _tell(f"{name}: ended by {error.signal.name}")
        return 128 + error.signal
    except RunStoppedError as error:
        text = str(error)  # which other ranks may have too: what to do is told once a machine
        _tell(f"{name}: {text if rendezvous.local_rank == 0 else text.splitlines()[0]}")
        return 1
    except Exception as error:  # noqa: BLE001  # the top of the program
        # The outermost frame is this function, which tells a reader nothing.
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, frames))
        first_line = (str(error).strip().splitlines() or [""])[0]
        _tell(f"{text}{name}: failed: {type(error).__name__}: {first_line}")
        return 1
    return 0


def _tell(message: str) -> None:
    """Print the one message. A rank that was ended may have left the cursor hidden."""
    if sys.stdout.isatty():
        sys.stdout.write(_SHOW_CURSOR + "\n")
        sys.stdout.flush()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
