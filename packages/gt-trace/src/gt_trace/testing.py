"""What tests need: gloo workers that live as long as a module, a fake world, FlexAttention on CPU.

Importing torch takes seconds and a test milliseconds, so workers are started once and reused (as
torch's own continuous multi-process tests do). They are forked from a server that has imported
torch and nothing else: no thread of the test process reaches them. For tests of this workspace
and for those of its users.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from gt_trace.gloo import use_one_gloo_thread

# The first sharded forward imports torch._dynamo, which costs each worker seconds: once is enough.
_PRELOAD = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "gt_trace.testing",
]


class WorkerError(AssertionError):
    """A function failed on a rank. The text holds the rank and its traceback."""


class GlooWorkers:
    """Processes that form one gloo process group, each with one thread for compute.

    Args:
        num_ranks: size of the world.
        timeout: seconds that one call may take.
        preload: modules that each worker has imported. All pools of a process fork from one
            server, which has those of the first pool: workers of later ones import the others.

    Use it as a context manager, or call ``close``. After a failure the workers are gone, since
    ranks may be left inside different collectives; the next call starts new ones.
    """

    def __init__(
        self, num_ranks: int, *, timeout: float = 120.0, preload: Sequence[str] = ()
    ) -> None:
        self.num_ranks = num_ranks
        self._preload = [*_PRELOAD, *preload]
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank.

        Args:
            function: importable by name in another process (a top-level function of a module
                that is on ``sys.path``).
            args: picklable, as is what it returns.

        Returns:
            What each rank returned, by rank.

        Raises:
            WorkerError: a rank raised, died, or took longer than the timeout.
        """
        if not self._processes:
            self._start()
        task = pickle.dumps((function, args))
        results: dict[int, Any] = {}
        waiting: dict[Any, int] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(task)
            except OSError:
                self._fail(self._death_of(rank))
            waiting[connection] = rank
        deadline = time.monotonic() + self._timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} took more than {self._timeout} s")
            for answered in ready:
                rank = waiting.pop(answered)
                try:
                    answer = self._connections[rank].recv_bytes()
                except (EOFError, OSError):
                    self._fail(self._death_of(rank))
                succeeded, value = pickle.loads(answer)
                if not succeeded:
                    self._fail(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """End the workers. Calling it twice is harmless."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            # A worker at rest ends when its connection closes; one inside a collective does not.
            process.join(1 if process.is_alive() else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-workers-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.num_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.num_ranks, store, self._timeout, self._preload, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def _death_of(self, rank: int) -> str:
        self._processes[rank].join(1)
        return f"rank {rank} died with exit code {self._processes[rank].exitcode}"

    def _fail(self, message: str) -> NoReturn:
        for process in self._processes:
            process.kill()
        self.close()
        raise WorkerError(message)


def _serve(
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    preload: Sequence[str],
    connection: Connection,
) -> None:
    """Answer calls until the other side closes the connection."""
    for name in preload:
        importlib.import_module(name)
    torch.set_num_threads(1)
    use_one_gloo_thread()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]  # exported at run time
        rank=rank,
        world_size=world_size,
        # Workers whose tests were killed do not wait for each other much longer.
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(task)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:  # noqa: BLE001  # whatever ended the call is the caller's to see
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
    dist.destroy_process_group()


@contextmanager
def fake_world(*, rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world that does not exist: collectives return at once, without data.

    For planning, tracing and counting; any number of ranks, one process. No process group may
    exist before.
    """
    # The fake process group is registered by this import; it has no public home.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
