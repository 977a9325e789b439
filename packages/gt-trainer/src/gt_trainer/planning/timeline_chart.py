"""What ranks do over a step: a line for each, with bars from left to right."""

from __future__ import annotations

from html import escape

from gt_trainer.dry_run.step_timeline import StepTimeline, TimelineRow

TIMELINE_STYLE = """
.rank { display: grid; grid-template-columns: 6.5rem 1fr; gap: .5rem; font-size: .8rem;
  line-height: 1.2; align-items: center; margin-bottom: .2rem }
.rank svg { width: 100%; height: 1rem; background: rgb(128 128 128 / .15) }
""".strip()
"""What ``timeline_chart`` needs of a page's style sheet."""

_COLOURS = {
    "forward": "#3b7dd8",
    "loss": "#c9a227",
    "backward": "#3a9d5d",
    "gradients of inputs": "#2aa3a3",
    "gradients of weights": "#e08a2b",
    "forward and backward": "#7d9bb0",
    "other computation": "#8a8f98",
    "communication": "#9b5fc0",
    "optimizer": "#c0604f",
}
"""Of all kinds, in the order of the key."""


def timeline_chart(timeline: StepTimeline) -> str:
    """Draw it, with a key."""
    kinds = {bar.kind for row in timeline.rows for bar in row.bars}
    key = "".join(
        f'<span><span class="key" style="background: {colour}"></span>{kind}</span> '
        for kind, colour in _COLOURS.items()
        if kind in kinds
    )
    rows = "\n".join(_row(row, timeline.end_us) for row in timeline.rows)
    return (
        f"<p>{escape(timeline.what)}; from 0 to {timeline.end_us / 1000:,.0f} ms.</p>\n"
        f'<p class="keys">{key}</p>\n<div role="img" aria-label="what ranks do over the step">\n'
        f"{rows}\n</div>"
    )


def _row(row: TimelineRow, end_us: float) -> str:
    paths = "".join(
        f'<path fill="{colour}" d="{drawn}"/>'
        for kind, colour in _COLOURS.items()
        if (drawn := _bars(row, kind, end_us))
    )
    return (
        f'<div class="rank"><span>{escape(row.name)}</span><svg viewBox="0 0 100 1" '
        f'preserveAspectRatio="none">{paths}</svg></div>'
    )


def _bars(row: TimelineRow, kind: str, end_us: float) -> str:
    return "".join(
        f"M{100 * bar.start_us / end_us:.2f} 0H{100 * bar.end_us / end_us:.2f}V1"
        f"H{100 * bar.start_us / end_us:.2f}Z"
        for bar in row.bars
        if bar.kind == kind
    )
