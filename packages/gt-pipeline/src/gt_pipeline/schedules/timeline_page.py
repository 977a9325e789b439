"""Simulated schedules as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gt_pipeline.schedules.actions import TEXT_OF_KIND, Action
from gt_pipeline.schedules.rank_lists import LANES, Lane, Span
from gt_pipeline.schedules.simulation import ScheduleTimeline
from gt_pipeline.schedules.timeline_text import short_name, table_of, title_of

_WIDTH = 1400
_LEFT = 70
_COMPUTE_HEIGHT = 30
_OTHER_HEIGHT = 10
_GAP = 6
_CHARACTER = 6.5

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1500px }
figure { margin: 1.5rem 0 } figcaption { margin-bottom: .4rem }
svg { width: 100%; height: auto } text { font-size: 11px; fill: currentColor }
text.bar { fill: #fff; pointer-events: none }
rect:hover { stroke: currentColor }
.F { fill: #3b7dd8 } .B { fill: #3a9d5d } .I { fill: #2aa3a3 } .W { fill: #e08a2b }
.transfer { fill: #8a8f98 } .collective { fill: #9b5fc0 }
.later { fill-opacity: .62 }
.grid { stroke: currentColor; stroke-opacity: .15 }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
.key { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em; vertical-align: -.1em }
""".strip()

_KEY = (
    ("F", "#3b7dd8", "forward"),
    ("B", "#3a9d5d", "whole backward"),
    ("I", "#2aa3a3", "gradients of the input (dI)"),
    ("W", "#e08a2b", "gradients of the weights (dW)"),
    ("transfer", "#8a8f98", "send and receive"),
    ("collective", "#9b5fc0", "unshard and reduce"),
)


def timelines_page(timelines: Sequence[ScheduleTimeline]) -> str:
    """An HTML document that draws timelines below each other, at one scale.

    A rank's second and later stages are paler, and the two halves of a bar overlap.
    """
    title = "Pipeline schedules, simulated"
    longest = max((each.makespan for each in timelines), default=0.0)
    scale = (_WIDTH - _LEFT) / longest if longest else 1.0
    key = "".join(
        f'<span class="key" style="background: {colour}"></span>{name}' for _, colour, name in _KEY
    )
    figures = "\n".join(_figure(each, scale) for each in timelines)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>No clock was read: times come from the costs that were given, in "
        "their unit. Two colours in one bar overlap; a rank's second and later stages are paler."
        f"</p>\n<p>{key}</p>\n{figures}\n</body>\n</html>\n"
    )


def _figure(timeline: ScheduleTimeline, scale: float) -> str:
    lanes = tuple(
        lane
        for lane in LANES
        if lane == "compute"
        or any(each.lane == lane and each.duration > 0 for each in timeline.spans)
    )
    rank_height = sum(_height(lane) for lane in lanes) + _GAP
    height = rank_height * timeline.schedule.num_ranks
    drawn = "\n".join(_rank_lines(timeline, rank_height))
    bars = "\n".join(
        _bar(timeline, span, lanes, rank_height, scale)
        for span in timeline.spans
        if span.lane in lanes and span.duration > 0
    )
    return (
        f"<figure>\n<figcaption>{escape(title_of(timeline))}</figcaption>\n"
        f'<svg viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img">\n'
        f"{drawn}\n{bars}\n</svg>\n{_table(timeline)}\n</figure>"
    )


def _rank_lines(timeline: ScheduleTimeline, rank_height: int) -> Iterator[str]:
    for rank in range(timeline.schedule.num_ranks):
        top = rank * rank_height
        yield f'<text x="0" y="{top + 20}">rank {rank}</text>'
        yield (
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{top + rank_height - 3}" '
            f'y2="{top + rank_height - 3}"/>'
        )


def _bar(
    timeline: ScheduleTimeline, span: Span, lanes: Sequence[Lane], rank_height: int, scale: float
) -> str:
    top = span.rank * rank_height + sum(_height(lane) for lane in lanes[: lanes.index(span.lane)])
    left = _LEFT + span.start * scale
    width = span.duration * scale
    parts = span.action.compute_parts or (span.action,)
    height = _height(span.lane) / len(parts)
    title = f"{span.action}, rank {span.rank}: {span.start:g} to {span.end:g}"
    drawn = "".join(
        f'<rect class="{_class(timeline, span, part)}" x="{left:.2f}" '
        f'y="{top + index * height:.1f}" width="{max(width - 0.5, 0.2):.2f}" '
        f'height="{height - 0.5:.1f}"><title>{escape(title)}</title></rect>'
        for index, part in enumerate(parts)
    )
    name = short_name(span.action)
    if span.lane != "compute" or len(name) * _CHARACTER > width:
        return drawn
    return f'{drawn}<text class="bar" x="{left + 2:.2f}" y="{top + 19}">{escape(name)}</text>'


def _class(timeline: ScheduleTimeline, span: Span, part: Action) -> str:
    name = TEXT_OF_KIND[part.kind] if span.lane == "compute" else span.lane
    is_first = timeline.schedule.stages_of_rank(span.rank)[0] == part.stage
    return name if is_first else f"{name} later"


def _height(lane: Lane) -> int:
    return _COMPUTE_HEIGHT if lane == "compute" else _OTHER_HEIGHT


def _table(timeline: ScheduleTimeline) -> str:
    header, *rows = table_of(timeline)
    lines = [
        "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>"
        for tag, row in (("th", header), *(("td", row) for row in rows))
    ]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
