"""Spans of a schedule, simulated or measured, as a trace for Perfetto or chrome://tracing.

One process a rank, one thread a lane. Arrows go from a send to its receive where both are there,
and a counter shows how many chunks a rank holds.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.dependencies import transferred_by
from gt_pipeline.schedules.liveness import live_after_each
from gt_pipeline.schedules.rank_lists import LANES, Span


def chrome_trace(spans: Iterable[Span], *, unit_us: float = 1.0) -> dict[str, Any]:
    """A trace of spans, as data that ``json`` can write.

    Args:
        spans: of any ranks, such as ``ScheduleTimeline.spans`` or what ``GraphPPRunner`` measured.
            Those of one rank and lane stand in the order in which they ran.
        unit_us: microseconds for which one unit of the spans' times stands.
    """
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
    events: list[dict[str, Any]] = []
    for rank, of_rank in sorted(by_rank.items()):
        events += _names(rank)
        events += [_complete(span, unit_us) for span in of_rank]
        events += _live_chunks(rank, of_rank, unit_us)
    events += _arrows([span for each in by_rank.values() for span in each], unit_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[Span], path: Path | str, *, unit_us: float = 1.0) -> None:
    """Write ``chrome_trace`` to a file; its folder is made if missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(spans, unit_us=unit_us)), encoding="utf-8")


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for thread, lane in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}}


def _complete(span: Span, unit_us: float) -> dict[str, Any]:
    action = span.action
    args = {"stage": action.stage, "microbatch": action.microbatch}
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.lower(),
        "pid": span.rank,
        "tid": LANES.index(span.lane),
        "ts": span.start * unit_us,
        "dur": span.duration * unit_us,
        "args": {name: number for name, number in args.items() if number is not None},
    }


def _live_chunks(rank: int, spans: list[Span], unit_us: float) -> Iterator[dict[str, Any]]:
    computed = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.end)
    for span, live in zip(computed, live_after_each(span.action for span in computed), strict=True):
        yield {
            "ph": "C",
            "name": "live chunks",
            "pid": rank,
            "ts": span.end * unit_us,
            "args": {"chunks": live},
        }


def _arrows(spans: list[Span], unit_us: float) -> Iterator[dict[str, Any]]:
    sends: dict[Action, Span] = {span.action: span for span in spans if span.action.is_send}
    for number, span in enumerate(spans):
        if not span.action.is_receive:
            continue
        send = sends.get(transferred_by(span.action).send)
        if send is None:
            continue
        for phase, end in (("s", send), ("f", span)):
            yield {
                "ph": phase,
                "bp": "e",
                "id": number,
                "name": "transfer",
                "cat": "transfer",
                "pid": end.rank,
                "tid": LANES.index(end.lane),
                "ts": (end.start if phase == "s" else end.end) * unit_us,
            }
