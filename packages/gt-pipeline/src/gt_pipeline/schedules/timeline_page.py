"""Simulated schedules as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gt_config.pages import TimelineBar, html_page, key, table, timeline
from gt_pipeline.schedules.actions import TEXT_OF_KIND, Action
from gt_pipeline.schedules.rank_lists import LANES, Span
from gt_pipeline.schedules.simulation import ScheduleTimeline
from gt_pipeline.schedules.timeline_text import short_name, table_of, title_of

_STYLE = """
body { max-width: 1500px } figure { margin: 1.5rem 0 } figcaption { margin-bottom: .4rem }
.lane { grid-template-columns: 4rem 1fr }
.lane:not(.thin) div { height: 1.9rem }
""".strip()

_COLOURS = {
    "F": ("#3b7dd8", "forward"),
    "B": ("#3a9d5d", "whole backward"),
    "I": ("#2aa3a3", "gradients of the input (dI)"),
    "W": ("#e08a2b", "gradients of the weights (dW)"),
    "transfer": ("#8a8f98", "send and receive"),
    "collective": ("#9b5fc0", "unshard and reduce"),
}
_NOTE = (
    "No clock was read: times come from the costs that were given, in their unit. "
    "Two colours in one bar overlap; a rank's second and later stages are paler."
)
_PALER = "9e"
"""Opacity of a rank's second and later stages."""

_CHARACTERS = 200
"""Characters that fit into the width of a timeline."""


def timelines_page(timelines: Sequence[ScheduleTimeline]) -> str:
    """Return an HTML document that draws timelines below each other, at one scale.

    A rank's second and later stages are paler. The two halves of a bar overlap in time.
    """
    title = "Pipeline schedules, simulated"
    longest = max((each.makespan for each in timelines), default=0.0) or 1.0
    colours = {kind: colour for kind, (colour, _) in _COLOURS.items()}
    colours |= {f"{kind} later": f"{colour}{_PALER}" for kind, colour in colours.items()}
    body = [
        f"<h1>{title}</h1>\n<p>{_NOTE}</p>",
        key({kind: words for kind, (_, words) in _COLOURS.items()}),
        *(_figure(each, longest) for each in timelines),
    ]
    return html_page(title, body, style=_STYLE, colours=colours)


def _figure(simulated: ScheduleTimeline, longest: float) -> str:
    title = title_of(simulated)
    header, *rows = table_of(simulated)
    drawn = timeline(_lanes(simulated, longest), longest, title=title)
    numbers = table(rows, header, numbers=range(len(header)))
    return f"<figure>\n<figcaption>{escape(title)}</figcaption>\n{drawn}\n{numbers}\n</figure>"


def _lanes(
    simulated: ScheduleTimeline, longest: float
) -> Iterator[tuple[str, Iterator[TimelineBar]]]:
    shown = [span for span in simulated.spans if span.duration > 0]
    lanes = [lane for lane in LANES if lane == "compute" or any(s.lane == lane for s in shown)]
    for rank in range(simulated.schedule.num_ranks):
        for lane in lanes:
            spans = [span for span in shown if (span.rank, span.lane) == (rank, lane)]
            name = f"rank {rank}" if lane == "compute" else ""
            yield name, (bar for span in spans for bar in _bars(simulated, span, longest))


def _bars(simulated: ScheduleTimeline, span: Span, longest: float) -> Iterator[TimelineBar]:
    parts = span.action.compute_parts or (span.action,)
    name = short_name(span.action)
    has_room = len(name) <= _CHARACTERS * span.duration / longest
    for index, part in enumerate(parts):
        yield TimelineBar(
            start=span.start,
            end=span.end,
            kind=_kind(simulated, span, part),
            label=name if span.lane == "compute" and has_room and index == 0 else "",
            words=f"{span.action}, rank {span.rank}: {span.start:g} to {span.end:g}",
            half=index if len(parts) > 1 else None,
        )


def _kind(simulated: ScheduleTimeline, span: Span, part: Action) -> str:
    name = TEXT_OF_KIND[part.kind] if span.lane == "compute" else span.lane
    is_first = simulated.schedule.stages_of_rank(span.rank)[0] == part.stage
    return name if is_first else f"{name} later"
