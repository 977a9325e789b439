"""What pipeline ranks, or the streams of one rank, do over a simulated step, in a few bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gt_trace.node_metadata import phase_of

if TYPE_CHECKING:
    from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline
    from gt_trainer.dry_run.simulated_run import SimulatedRun

_COLUMNS = 800
"""Of a step: what lies closer together is one bar."""

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
    """Which part of a step it is, and of which ranks."""


def timeline_of_run(run: SimulatedRun) -> StepTimeline:
    """Computation and each kind of communication of one rank, which stands for all."""
    graph = run.graph.run
    timeline = graph.timeline
    end_us = timeline.makespan_us + run.optimizer_us
    computed = [
        Bar(start_us=start, end_us=end, kind=phase_of(node) or _NO_PHASE)
        for node, cost, start, end in zip(
            graph.nodes, graph.costs, timeline.start_us, timeline.end_us, strict=True
        )
        if cost.collective is None and cost.kind != "host_copy"
    ]
    computed.append(Bar(start_us=timeline.makespan_us, end_us=end_us, kind=_OPTIMIZER))
    by_name = {"computation": computed}
    for each in run.graph.collectives:
        by_name.setdefault(each.purpose, []).append(
            Bar(
                start_us=each.start_us,
                end_us=each.start_us + each.duration_us,
                kind=_COMMUNICATION,
            )
        )
    times = run.facts.num_microbatches
    which = "a step" if times == 1 else f"one of {times} microbatches and the optimizer"
    return _timeline(by_name, end_us, f"{which}, on any rank: all do alike")


def timeline_of_pipeline(run: SimulatedPipeline) -> StepTimeline:
    """Computation of each pipeline rank; where a rank has no bar it waits."""
    begin, end_us = run.time.makespan, run.time.makespan + run.optimizer_us
    by_name = {
        f"rank {rank}": [Bar(start_us=begin, end_us=end_us, kind=_OPTIMIZER)]
        for rank in range(run.lowered.schedule.num_ranks)
    }
    for span in run.time.timeline.spans:
        if span.lane == "compute":
            by_name[f"rank {span.rank}"].append(
                Bar(start_us=span.start, end_us=span.end, kind=_KINDS[span.action.kind])
            )
    times = run.facts.num_microbatches
    which = "a step" if times == 1 else f"one of {times} runs of the schedule and the optimizer"
    return _timeline(by_name, end_us, f"{which}, on the ranks of a pipeline")


def _timeline(by_name: dict[str, list[Bar]], end_us: float, what: str) -> StepTimeline:
    rows = tuple(
        TimelineRow(name=name, bars=tuple(joined(bars, end_us / _COLUMNS)))
        for name, bars in by_name.items()
    )
    return StepTimeline(rows=rows, end_us=end_us, what=what)


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
