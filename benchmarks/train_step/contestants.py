"""Start a contestant's four ranks, step them together, and read the clock.

All clocks are read here, in the measuring process, which waits in between.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Literal

from gt_trainer.startup import PROCESS_START_VARIABLE
from train_step.commands import CHANNELS_VARIABLE, Command, StepDone
from train_step.workloads import Workload

__all__ = ["NAMES", "NUM_RANKS", "Contestant", "ContestantError", "ContestantName", "Step"]

ContestantName = Literal["ours", "graph", "eager", "core"]

NAMES: dict[ContestantName, str] = {
    "ours": "graph trainer (ours)",
    "graph": "torchtitan graph_trainer",
    "eager": "torchtitan graph_trainer, eager",
    "core": "torchtitan core (FSDP2)",
}

NUM_RANKS = 4

_BENCHMARKS = Path(__file__).resolve().parent.parent
_START_SECONDS = 600.0
_STEP_SECONDS = 300.0
_STOP_SECONDS = 60.0


class ContestantError(RuntimeError):
    """A contestant ended, or did not answer; the text holds the end of its logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of all ranks."""

    seconds: float
    """From the command (for the first step: from before the processes are started) to the last
    rank's answer."""
    cpu_seconds: float
    """Processor time, summed over ranks; for the first step with the process that forked them."""
    ranks: tuple[StepDone, ...]
    launcher_cpu_seconds: float = 0.0
    """Those of them that the process took which forked the ranks; 0 of all but a first step."""

    @property
    def loss(self) -> float:
        return self.ranks[0].loss


class Contestant:
    """Four rank processes of one system on one workload, blocked until told to step.

    Args:
        name: Which system.
        workload: What to train.
        workload_key: Its key in ``WORKLOADS``.
        folder: For its output and logs.
        artifacts: Ours alone: the folder of captured graphs, empty for a cold start.
    """

    def __init__(
        self,
        name: ContestantName,
        workload: Workload,
        *,
        workload_key: str,
        folder: Path,
        artifacts: Path | None = None,
    ) -> None:
        self.name = name
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Connection] = []
        folder.mkdir(parents=True)
        pairs = [socket.socketpair() for _ in range(NUM_RANKS)]
        theirs = [their_end.fileno() for _, their_end in pairs]
        begin = time.perf_counter()
        environment = _environment(theirs)
        if name == "ours":
            command = _our_command(workload, workload_key, folder)
            if artifacts is not None:
                command += ["--compile.artifacts", str(artifacts)]
            self._start(command, environment, theirs)
        else:
            command = [sys.executable, "-m", "train_step.peers", name, workload_key, str(folder)]
            rendezvous = _rendezvous()
            for rank, descriptor in enumerate(theirs):
                self._start(command, environment | rendezvous(rank), [descriptor])
        for own_end, their_end in pairs:
            their_end.close()
            self._channels.append(Connection(own_end.detach()))
        try:
            ranks = self._answers(_START_SECONDS)
        except BaseException:
            self.kill()
            raise
        seconds = time.perf_counter() - begin
        launcher = _cpu_seconds(self._processes[0].pid) if name == "ours" else 0.0
        self.first_step = Step(
            seconds=seconds,
            cpu_seconds=sum(rank.cpu_seconds for rank in ranks) + launcher,
            ranks=ranks,
            launcher_cpu_seconds=launcher,
        )

    def step(self) -> Step:
        """Make one optimizer step on all ranks.

        Raises:
            ContestantError: A rank ended or did not answer.
        """
        begin = time.perf_counter()
        self._command("step")
        ranks = self._answers(_STEP_SECONDS)
        return Step(
            seconds=time.perf_counter() - begin,
            cpu_seconds=sum(rank.cpu_seconds for rank in ranks),
            ranks=ranks,
        )

    def stop(self) -> None:
        """Tell all ranks to end, and wait.

        Raises:
            ContestantError: A process ended badly, or did not end.
        """
        self._command("stop")
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            statuses = [p.wait(max(0.0, deadline - time.monotonic())) for p in self._processes]
        except subprocess.TimeoutExpired:
            raise self._error("did not end when told to") from None
        if any(statuses):
            raise self._error(f"ended with status {statuses}")

    def kill(self) -> None:
        """End whatever still runs. Our ranks end with the launcher that forked them."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self,
        exception: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self.kill)
            if exception is None:
                self.stop()

    def _start(self, command: list[str], environment: dict[str, str], channels: list[int]) -> None:
        with (self._folder / f"process{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    pass_fds=channels,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _command(self, command: Command) -> None:
        for channel in self._channels:
            try:
                channel.send(command)
            except BrokenPipeError:
                raise self._error("ended") from None

    def _answers(self, limit_seconds: float) -> tuple[StepDone, ...]:
        deadline = time.monotonic() + limit_seconds
        answers: dict[Connection, StepDone] = {}
        while waiting := [channel for channel in self._channels if channel not in answers]:
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._error(f"did not answer within {limit_seconds:.0f} s")
            for channel in ready:
                assert isinstance(channel, Connection)
                try:
                    answers[channel] = channel.recv()
                except (EOFError, ConnectionResetError):
                    raise self._error("ended") from None
        return tuple(answers[channel] for channel in self._channels)

    def _error(self, what: str) -> ContestantError:
        logs = sorted(self._folder.glob("process*.log"))
        ends = [
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            for log in logs
        ]
        return ContestantError("\n".join([f"{NAMES[self.name]} {what}", *ends]))


def _our_command(workload: Workload, workload_key: str, folder: Path) -> list[str]:
    flags = [f"--parallelism.{name}={degree}" for name, degree in workload.degrees.items()]
    return [
        *(sys.executable, "-m", "gt_trainer", "--nproc", str(NUM_RANKS)),
        *("--module", "train_step.ours", "--config", workload_key),
        *flags,
        *("--dump_folder", str(folder)),
    ]


def _environment(channels: list[int]) -> dict[str, str]:
    """The same for all: one thread a process, loopback, our modules to be found."""
    paths = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "GT_DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        CHANNELS_VARIABLE: ",".join(map(str, channels)),
        PROCESS_START_VARIABLE: repr(time.time()),
    }


def _rendezvous() -> Callable[[int], dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def of_rank(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    return of_rank


def _cpu_seconds(pid: int) -> float:
    """Processor time of a living process; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
