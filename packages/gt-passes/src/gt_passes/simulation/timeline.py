"""Tasks on streams: when each runs, and who waits for whom.

A host issues tasks one after another; every stream runs its own in the order in which they were
issued; a task also waits for named tasks of other streams. That is CUDA: kernels and NCCL's
collectives on their streams, events between them, and a host that is ahead or behind.

A task starts when all of these are over: the one before it on its stream, those it waits for, and
its launch by the host. A task that takes a part of the device, as a collective does, slows down
what runs beside it on other streams (``beside``). One pass over the tasks in program order, so
linear time. Nothing here knows of graphs: pipelines and placement use it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gt_passes.errors import GtPassesError
from gt_passes.simulation.beside import DeviceParts, Neighbours


class TaskOrderError(GtPassesError, ValueError):
    """A task waits for one that is issued later, or for one that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work."""

    name: str
    stream: str
    duration_us: float
    waits_for: tuple[int, ...] = ()
    """Positions of earlier tasks that must be over first. On the same stream it goes without
    saying."""

    host_us: float = 0.0
    """How long the host takes to issue it."""

    blocks_host: bool = False
    """Whether the host issues nothing more until it is over."""

    needs: DeviceParts | None = None
    """Microseconds of its duration, which is that without neighbours; None if none slows it."""

    takes: DeviceParts | None = None
    """Fractions of the device that tasks on other streams lack while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stream had nothing to run because a task on another stream was not over."""

    stream: str
    waiting: int
    """Position of the task that could not start."""

    waited_for: int
    """Position of the task that was last to end of those waited for."""

    duration_us: float
    """Beyond the end of the stream's own work and the launch by the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each task ran. Microseconds from the start of the first launch.

    For every stream: end of its last task = busy + stalls + host idle.
    """

    tasks: tuple[Task, ...]
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    stalls: tuple[Stall, ...]
    host_end_us: float
    """When the host had issued everything."""

    host_idle_us: Mapping[str, float]
    """How long each stream had nothing to run because the host had not issued it yet."""

    slowed_us: Mapping[str, float]
    """How much longer each stream was busy than alone, beside what took a part of the device."""

    @property
    def makespan_us(self) -> float:
        """Until the last task is over and the host is done."""
        return max((self.host_end_us, *self.end_us))

    def busy_us(self, stream: str) -> float:
        """How long a stream ran tasks."""
        spans = zip(self.tasks, self.start_us, self.end_us, strict=True)
        return sum(end - start for task, start, end in spans if task.stream == stream)

    def stalled_us(self, stream: str) -> float:
        """How long a stream waited for tasks of other streams."""
        return sum(stall.duration_us for stall in self.stalls if stall.stream == stream)


def schedule(
    tasks: Sequence[Task], *, launch_latency_us: float = 0.0, sync_us: float = 0.0
) -> Timeline:
    """Run tasks on paper.

    Args:
        tasks: in program order, the order in which the host issues them.
        launch_latency_us: from the host's launch to the earliest start on the device.
        sync_us: added when the host waits for a task that is not over yet.

    Raises:
        TaskOrderError: a task waits for itself, a later one, or none; all of them at once.
    """
    _check_order(tasks)
    starts: list[float] = []
    ends: list[float] = []
    stalls: list[Stall] = []
    tails: dict[str, float] = {}
    neighbours = Neighbours()
    host_idle: dict[str, float] = {}
    slowed: dict[str, float] = {}
    host_us = 0.0
    for position, task in enumerate(tasks):
        host_us += task.host_us
        issued = host_us + launch_latency_us if task.host_us else host_us
        tail = tails.get(task.stream, 0.0)
        runnable = max(tail, issued)
        start, last = runnable, -1
        for other in task.waits_for:
            if ends[other] > start:
                start, last = ends[other], other
        if issued > tail:
            host_idle[task.stream] = host_idle.get(task.stream, 0.0) + issued - tail
        if last >= 0:
            stalls.append(
                Stall(
                    stream=task.stream,
                    waiting=position,
                    waited_for=last,
                    duration_us=start - runnable,
                )
            )
        end = start + task.duration_us
        if task.needs is not None:
            delay_us = neighbours.delay_us(task.stream, start, task.duration_us, task.needs)
            slowed[task.stream] = slowed.get(task.stream, 0.0) + delay_us
            end += delay_us
        if task.takes is not None:
            neighbours.add(task.stream, start, end, task.takes)
        starts.append(start)
        ends.append(end)
        tails[task.stream] = end
        if task.blocks_host and end > host_us:
            host_us = end + sync_us
    return Timeline(
        tasks=tuple(tasks),
        start_us=tuple(starts),
        end_us=tuple(ends),
        stalls=tuple(stalls),
        host_end_us=host_us,
        host_idle_us=MappingProxyType(host_idle),
        slowed_us=MappingProxyType(slowed),
    )


def _check_order(tasks: Iterable[Task]) -> None:
    problems = [
        f"task {position} ({task.name}) waits for task {other}"
        for position, task in enumerate(tasks)
        for other in task.waits_for
        if not 0 <= other < position
    ]
    if problems:
        raise TaskOrderError(
            "tasks may wait for those issued before them only:\n  " + "\n  ".join(problems)
        )
