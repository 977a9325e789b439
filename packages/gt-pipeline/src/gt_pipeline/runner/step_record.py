"""What a step did and when, as the ranks measured it.

Recording costs time on every action, so it is off unless a step is asked for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gt_pipeline.runner.stage_protocol import PipelineStageGraphs
from gt_pipeline.schedules import Action
from gt_pipeline.schedules.rank_lists import Lane, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One rank's part of one step."""

    rank: int
    """The rank's place in the pipeline."""

    spans: tuple[Span, ...]
    """When every action ran, in order, in microseconds since the rank's first action started. On a
    CPU: from the start of the action's call to its end, waiting included. On a GPU: by events on
    the current stream, so of transfers only what that stream waits for. Of UNSHARD and REDUCE_GRAD
    of graph stages: their launch."""

    peak_live: int
    """The most chunks that were held at once; the counterpart of `schedules.peak_live`."""


def record_actions(
    actions: Sequence[Action],
    runs: Sequence[Callable[[], None]],
    *,
    rank: int,
    stages: Mapping[int, PipelineStageGraphs],
    at: Callable[[int], None],
) -> StepRecord:
    """Run a program's entries and measure them; ``at`` is told each position before it runs."""
    device = next(iter(stages.values())).device
    clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)
    peak = 0
    for position, (action, run) in enumerate(zip(actions, runs, strict=True)):
        at(position)
        live = sum(stage.num_saved for stage in stages.values())
        clock.tick()
        run()
        clock.tick()
        if len(action.compute_parts) == 2:
            live += 1  # what its forward saves and what its backward frees are live together
        peak = max(peak, live, sum(stage.num_saved for stage in stages.values()))
    times = clock.microseconds()
    return StepRecord(
        rank=rank,
        spans=tuple(
            Span(
                rank=rank,
                lane=_lane(action),
                action=action,
                start=times[2 * position],
                end=times[2 * position + 1],
            )
            for position, action in enumerate(actions)
        ),
        peak_live=peak,
    )


def _lane(action: Action) -> Lane:
    if action.is_compute:
        return "compute"
    return "transfer" if action.is_point_to_point else "collective"


class _HostClock:
    def __init__(self) -> None:
        self._ticks: list[int] = []

    def tick(self) -> None:
        self._ticks.append(time.perf_counter_ns())

    def microseconds(self) -> list[float]:
        return [(tick - self._ticks[0]) / 1000 for tick in self._ticks]


class _DeviceClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ticks: list[torch.Event] = []

    def tick(self) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._ticks.append(event)

    def microseconds(self) -> list[float]:
        self._ticks[-1].synchronize()
        return [1000 * self._ticks[0].elapsed_time(tick) for tick in self._ticks]
