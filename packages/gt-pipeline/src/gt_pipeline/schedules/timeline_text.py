"""A simulated schedule as text: one line a rank, time from left to right.

::

    1F1B: 2 ranks, 2 stages, 2 microbatches
    rank 0 |0F0 0F1         0B0----     0B1----
    rank 1 |    1F0 1B0---- 1F1 1B1----

Dashes are an action that still runs; ``F&B`` is a forward and a backward that overlap.
"""

from __future__ import annotations

import math

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.rank_lists import Span
from gt_pipeline.schedules.simulation import ScheduleTimeline

# More columns of time than this are more than anybody reads.
_MAX_COLUMNS = 400


def timeline_text(timeline: ScheduleTimeline, *, width: int = 120) -> str:
    """Draw what each rank computes and when; its idle time and live chunks stand below.

    A picture of more than ``width`` characters goes on below itself.

    Raises:
        ScheduleError: ``width`` leaves no room for one action.
    """
    by_rank = [
        [each for each in timeline.spans if each.rank == rank and each.lane == "compute"]
        for rank in range(timeline.schedule.num_ranks)
    ]
    unit = _unit(timeline)
    cell = _cell_width([span for spans in by_rank for span in spans], unit)
    labels = [f"rank {rank} |" for rank in range(len(by_rank))]
    margin = max(len(label) for label in labels)
    per_panel = (width - margin) // cell
    if per_panel < 1:
        raise ScheduleError(
            what=f"width is {width} characters", problems=[f"it must be at least {margin + cell}"]
        )
    rows = [_row(spans, unit, cell) for spans in by_rank]
    num_columns = max(math.ceil(len(row) / cell) for row in rows)
    lines = [title_of(timeline), ""]
    for first in range(0, num_columns, per_panel):
        if num_columns > per_panel:
            lines.append(f"{'':{margin}}from {first * unit:g}")
        lines += [
            f"{label:>{margin}}{row[first * cell : (first + per_panel) * cell]}".rstrip()
            for label, row in zip(labels, rows, strict=True)
        ]
        lines.append("")
    return "\n".join([*lines, *_aligned(table_of(timeline)), ""])


def title_of(timeline: ScheduleTimeline) -> str:
    """The schedule's name, its sizes and what was simulated of it, in one line."""
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches; makespan {timeline.makespan:g}, "
        f"bubble {timeline.bubble:.1%}"
    )


def short_name(action: Action) -> str:
    """What fits into a bar: ``2F0``, or ``2F1&3B0`` for an overlap."""
    if action.parts is None:
        return str(action)
    return f"{action.parts[0]}&{action.parts[1]}"


def _unit(timeline: ScheduleTimeline) -> float:
    """The time that one column stands for: the shortest computation, if that is not too short."""
    shortest = min(
        (each.duration for each in timeline.spans if each.lane == "compute" and each.duration > 0),
        default=1.0,
    )
    return max(shortest, timeline.makespan / _MAX_COLUMNS)


def _cell_width(spans: list[Span], unit: float) -> int:
    return max(
        math.ceil((len(short_name(span.action)) + 1) / max(1, round(span.duration / unit)))
        for span in spans
    )


def _row(spans: list[Span], unit: float, cell: int) -> str:
    row = ""
    for span in spans:
        start, end = (math.floor(time / unit + 0.5) * cell for time in (span.start, span.end))
        row = f"{row:<{start}}{short_name(span.action):-<{max(0, end - start - 1)}} "
    return row


def table_of(timeline: ScheduleTimeline) -> list[list[str]]:
    """What every rank adds up to, as cells: a header, and a row for each rank."""
    columns = (timeline.compute, timeline.idle, timeline.idle_within_span, timeline.peak_live)
    return [
        ["rank", "computes", "idle", "idle within", "live chunks"],
        *(
            [str(rank), *(f"{column[rank]:g}" for column in columns)]
            for rank in range(timeline.schedule.num_ranks)
        ),
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
