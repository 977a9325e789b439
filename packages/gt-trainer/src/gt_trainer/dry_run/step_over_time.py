"""The timeline of a simulated step and its memory, as few enough bars and moments to draw."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gt_trace.node_metadata import phase_of

if TYPE_CHECKING:
    from gt_pipeline.schedules import ScheduleTimeline
    from gt_trainer.dry_run.simulated_step import SimulatedStep

_COLUMNS = 800
"""Parts of a step's time that a reader can distinguish: closer bars are drawn as one."""

_MOST_MOMENTS = 240
_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "gradients of inputs",
    "BACKWARD_WEIGHT": "gradients of weights",
    "OVERLAP_F_B": "forward and backward",
}
_NO_PHASE = "other computation"
_COMMUNICATION = "communication"
_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAt:
    """Memory that is held from a moment to the next one."""

    start_us: float
    held: Mapping[str, int]
    """Bytes by kind."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverStep:
    """Memory from the beginning of a graph or a schedule to the end of the optimizer."""

    moments: tuple[HeldAt, ...]
    """Moments by time; the peak is one of them."""

    end_us: float
    what: str
    """Description: the part of a step, and the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something of one kind, without a pause that could be seen."""

    start_us: float
    end_us: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """A rank or a stream."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """Rows from the beginning of a graph or a schedule to the end of the optimizer."""

    rows: tuple[TimelineRow, ...]
    end_us: float
    what: str
    """Description: the part of a step, and the ranks."""


def memory_over_step(step: SimulatedStep) -> MemoryOverStep:
    """Return the memory of the fullest rank; without a pipeline, while its fullest graph runs."""
    end_us, fullest = step.run_us + step.optimizer_us, step.fullest
    moments = [
        HeldAt(start_us=start, held=moment.bytes_by_part)
        for start, moment in zip(step.memory_at_us, fullest.moments, strict=True)
    ]
    where = "" if step.schedule is None else f", on pipeline rank {fullest.rank}"
    return MemoryOverStep(
        moments=tuple(thinned(moments, end_us)), end_us=end_us, what=f"{_part(step, 'the')}{where}"
    )


def step_timeline(step: SimulatedStep) -> StepTimeline:
    """Return the timeline of each pipeline rank, or of each stream of any rank."""
    begin, end_us = step.run_us, step.run_us + step.optimizer_us
    optimizer = Bar(start_us=begin, end_us=end_us, kind=_OPTIMIZER)
    if step.schedule is None:
        by_name, where = _streams(step, optimizer), "any rank: all do alike"
    else:
        by_name = _ranks(step.schedule.time.timeline, optimizer)
        where = "the ranks of a pipeline"
    rows = tuple(
        TimelineRow(name=name, bars=tuple(joined(bars, end_us / _COLUMNS)))
        for name, bars in by_name.items()
    )
    return StepTimeline(rows=rows, end_us=end_us, what=f"{_part(step, 'a')}, on {where}")


def _part(step: SimulatedStep, article: str) -> str:
    times = step.facts.num_microbatches
    repeated = "microbatches" if step.schedule is None else "runs of the schedule"
    return f"{article} step" if times == 1 else f"one of {times} {repeated} and the optimizer"


def _streams(step: SimulatedStep, optimizer: Bar) -> dict[str, list[Bar]]:
    """The bars of computation, and of each purpose of communication."""
    run, timeline = step.graph.run, step.graph.run.timeline
    computed = [
        Bar(start_us=start, end_us=end, kind=phase_of(node) or _NO_PHASE)
        for node, cost, start, end in zip(
            run.nodes, run.costs, timeline.start_us, timeline.end_us, strict=True
        )
        if cost.collective is None and cost.kind != "host_copy"
    ]
    by_name = {"computation": [*computed, optimizer]}
    for each in step.graph.collectives:
        end_us = each.start_us + each.duration_us
        bar = Bar(start_us=each.start_us, end_us=end_us, kind=_COMMUNICATION)
        by_name.setdefault(each.purpose, []).append(bar)
    return by_name


def _ranks(timeline: ScheduleTimeline, optimizer: Bar) -> dict[str, list[Bar]]:
    """The bars of each pipeline rank; where a rank has none it waits."""
    by_name = {f"rank {rank}": [optimizer] for rank in range(len(timeline.compute))}
    for span in timeline.spans:
        if span.lane == "compute":
            bar = Bar(start_us=span.start, end_us=span.end, kind=_KINDS[span.action.kind])
            by_name[f"rank {span.rank}"].append(bar)
    return by_name


def joined(bars: Iterable[Bar], pause_us: float) -> Iterator[Bar]:
    """Bars by kind and time, those of a kind as one where no longer pause is between them."""
    last: Bar | None = None
    for each in sorted(bars, key=lambda bar: (bar.kind, bar.start_us)):
        if each.end_us <= each.start_us:
            continue
        if last is None or each.kind != last.kind or each.start_us > last.end_us + pause_us:
            if last is not None:
                yield last
            last = each
            continue
        last = Bar(start_us=last.start_us, end_us=max(last.end_us, each.end_us), kind=last.kind)
    if last is not None:
        yield last


def thinned(
    moments: Sequence[HeldAt], end_us: float, *, most: int = _MOST_MOMENTS
) -> Iterator[HeldAt]:
    """Keep the fullest of the moments that begin in the same part of the time.

    Args:
        moments: by time.
        end_us: until when the last one lasts.
        most: number of parts of the time.
    """
    part_us = end_us / most or 1.0
    for _, together in itertools.groupby(
        moments, lambda each: min(each.start_us // part_us, most - 1)
    ):
        some = list(together)
        fullest = max(some, key=lambda each: each.num_bytes)
        yield HeldAt(start_us=some[0].start_us, held=fullest.held)
