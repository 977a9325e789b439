"""Simulated timelines of a layer as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from chunk_overlap.overlap_picture import (
    LANES,
    Bar,
    LayerTimeline,
    common_scale,
)

_WIDTH = 1200
_LEFT = 160
_LANE_HEIGHT = 34
_NUM_COLOURS = 6

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px }
figure { margin: 1.5rem 0 } figcaption { margin-bottom: .4rem }
svg { width: 100%; height: auto } text { font-size: 12px; fill: currentColor }
rect:hover { stroke: currentColor }
.none { fill: #8a8f98 } .c0 { fill: #3b7dd8 } .c1 { fill: #e08a2b } .c2 { fill: #3a9d5d }
.c3 { fill: #9b5fc0 } .c4 { fill: #c94f4f } .c5 { fill: #2aa3a3 } .exposed { fill: #d11f3a }
.grid { stroke: currentColor; stroke-opacity: .15 }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left }
""".strip()


def overlap_page(timelines: Mapping[str, LayerTimeline]) -> str:
    """An HTML document that draws timelines below each other, at one scale.

    Args:
        timelines: by what they are called, as ``{"before": ..., "after": ...}``.
    """
    title = "Simulated timeline of expert-parallel overlap"
    scale = common_scale(list(timelines.values()), _WIDTH)
    figures = "\n".join(_figure(name, each, scale) for name, each in timelines.items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>No clock was read: every time comes from a model of the hardware. "
        "Each colour is a chunk, grey is what belongs to none, red is computation that stands "
        f"still for a token exchange.</p>\n{_table(timelines)}\n{figures}\n</body>\n</html>\n"
    )


def write_overlap_page(timelines: Mapping[str, LayerTimeline], path: Path) -> None:
    """Write ``overlap_page`` to a file; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(overlap_page(timelines), encoding="utf-8")


def _table(timelines: Mapping[str, LayerTimeline]) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td>"
        + "".join(
            f"<td>{time_us / 1000:.2f}</td>"
            for time_us in (
                each.end_us - each.start_us,
                each.exchange_us,
                each.hidden_us,
                each.exposed_us,
            )
        )
        + "</tr>"
        for name, each in timelines.items()
    ]
    header = "<tr><th>simulated, ms</th><th>layer</th><th>exchange</th><th>hidden</th>"
    return f"<table>\n{header}<th>exposed</th></tr>\n" + "\n".join(rows) + "\n</table>"


def _figure(name: str, timeline: LayerTimeline, scale: float) -> str:
    height = _LANE_HEIGHT * len(LANES) + 24
    caption = f"<b>{escape(name)}</b>: {escape(timeline.caption)}"
    parts = "\n".join((*_grid(timeline, scale, height), *_lanes(timeline, scale)))
    return (
        f'<figure>\n<figcaption>{caption}</figcaption>\n<svg viewBox="0 0 {_LEFT + _WIDTH} '
        f'{height}" role="img" aria-label="{escape(name)}">\n{parts}\n</svg>\n</figure>'
    )


def _grid(timeline: LayerTimeline, scale: float, height: int) -> Iterator[str]:
    whole_ms = int((timeline.end_us - timeline.start_us) / 1000)
    step = max(1, whole_ms // 12)
    for ms in range(0, whole_ms + 1, step):
        x = _LEFT + ms * 1000 / scale
        yield f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 20}"/>'
        yield f'<text x="{x:.1f}" y="{height - 6}">{ms} ms</text>'


def _lanes(timeline: LayerTimeline, scale: float) -> Iterator[str]:
    for number, lane in enumerate(LANES):
        top = number * _LANE_HEIGHT + 4
        yield f'<text x="0" y="{top + 18}">{lane}</text>'
        for bar in timeline.bars:
            if bar.lane == lane:
                yield _rectangle(bar, timeline, scale, top)


def _rectangle(bar: Bar, timeline: LayerTimeline, scale: float, top: int) -> str:
    start = max(bar.start_us, timeline.start_us)
    end = min(bar.end_us, timeline.end_us)
    x = _LEFT + (start - timeline.start_us) / scale
    style = "none" if bar.chunk_id is None else f"c{bar.chunk_id % _NUM_COLOURS}"
    style = "exposed" if bar.lane == "exposed" else style
    chunk = "no chunk" if bar.chunk_id is None else f"chunk {bar.chunk_id}"
    hint = f"{bar.name}, {bar.module}, {chunk}, {bar.end_us - bar.start_us:.0f} us"
    return (
        f'<rect class="{style}" x="{x:.2f}" y="{top}" width="{(end - start) / scale:.2f}" '
        f'height="{_LANE_HEIGHT - 10}"><title>{escape(hint)}</title></rect>'
    )
