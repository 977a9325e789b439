"""Parts of HTML pages: the document, tables, keys, bars, timelines and plots.

A page is one file. It needs neither a network nor a script, fits a phone, and follows the light or
dark setting of the screen. This module is in the lowest package because every other package that
draws a page uses it.

Lines are SVG that is stretched to their frame. Ticks, dots and words are HTML at their places, so
that they have the size of the text around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light dark; --faint: #8884 }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
figure { margin: 0 } pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .2rem .8rem; text-align: left; vertical-align: top }
td, th { border-bottom: 1px solid var(--faint) }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem } .key i { display: inline-block;
  width: .9em; height: .9em; margin-right: .35em; vertical-align: -.1em }
.bar { display: flex; height: 1.1rem; margin: .15rem 0; border-radius: .2rem; overflow: hidden }
.bar i { display: block }
""".strip()

_TIMELINE_STYLE = """
.lane { display: grid; grid-template-columns: 6.5rem 1fr; gap: .5rem; font-size: .8rem;
  line-height: 1.2; align-items: center; margin-bottom: .2rem }
.lane div { position: relative; height: 1rem; background: rgb(128 128 128 / .15) }
.lane.thin div { height: .5rem }
.lane i { position: absolute; height: 100%; min-width: 1px; overflow: hidden;
  font: 11px/1.2 system-ui; color: #fff }
.lane i:hover { outline: 1px solid currentColor }
""".strip()

_PLOT_STYLE = """
.plot { position: relative; height: 17rem; margin: .7rem 1rem 1.7rem 3.4rem }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible }
.plot path, .plot polyline, .plot line { vector-effect: non-scaling-stroke }
.plot span { position: absolute; font-size: .8rem; white-space: nowrap; opacity: .8 }
.plot .y { right: 100%; padding-right: .4rem; transform: translateY(50%) }
.plot .x { top: 100%; padding-top: .2rem; transform: translateX(-50%) }
.plot .dot { position: absolute; width: .65rem; height: .65rem; border-radius: 50%;
  transform: translate(-50%, 50%) }
.grid { stroke: currentColor; stroke-opacity: .18; fill: none }
.axis-label { font-size: .85rem; margin: 0 } .under { text-align: right }
""".strip()

_NUM_TICKS = 4


class Markup(str):
    """HTML text. All other text is escaped where it enters a page."""

    __slots__ = ()


def html_page(
    title: str, body: Iterable[str], *, style: str = "", colours: Mapping[str, str] | None = None
) -> str:
    """Return an HTML document.

    Args:
        title: of the document, not escaped.
        body: HTML of its parts. Empty parts are left out.
        style: further rules of the style sheet.
        colours: colours by kind, for ``key``, ``bar``, ``timeline`` and areas of a ``plot``.
    """
    rules = (
        f".{style_name(kind)} {{ background: {colour}; fill: {colour} }}"
        for kind, colour in (colours or {}).items()
    )
    sheet = "\n".join((_STYLE, _TIMELINE_STYLE, _PLOT_STYLE, *rules, style))
    text = "\n".join(filter(None, body))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{sheet}\n</style>\n</head>\n<body>\n"
        f"{text}\n</body>\n</html>\n"
    )


def style_name(kind: str) -> str:
    """Return the name in style sheets of a kind, as ``optimizer_state``."""
    return kind.replace(" ", "_")


def table(
    rows: Iterable[Sequence[str]],
    header: Sequence[str] = (),
    *,
    numbers: Container[int] = (),
    style_of: Callable[[str], str] = lambda cell: "",
) -> str:
    """Return a table that scrolls where it is wider than the page.

    Args:
        rows: cells, escaped except ``Markup``.
        header: cells of the first row; none leaves it out.
        numbers: the columns that hold numbers, which are aligned to the right.
        style_of: the style of a cell of any other column; "" for none.
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        parts = []
        for column, cell in enumerate(cells):
            style = "number" if column in numbers else style_of(cell)
            shown = cell if isinstance(cell, Markup) else escape(cell)
            parts.append(f"<{tag}{_style(style)}>{shown}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    lines = [line("th", header)] if header else []
    lines += [line("td", row) for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def key(kinds: Iterable[str] | Mapping[str, str], *further: str) -> str:
    """Return a line that names the colours of kinds.

    Args:
        kinds: the kinds; a mapping also has the words that name them.
        further: words at the end, which have no colour.
    """
    names = kinds if isinstance(kinds, Mapping) else {kind: kind for kind in kinds}
    items = [
        f'<span><i class="{style_name(kind)}"></i>{escape(words)}</span>'
        for kind, words in names.items()
    ]
    items += [f"<span>{escape(words)}</span>" for words in further]
    return f'<p class="key">{"".join(items)}</p>'


def bar_parts(
    parts: Mapping[str, float], *, longest: float, words: Mapping[str, str], side: str = "width"
) -> str:
    """Return the parts of a bar, one for each kind that has a value above 0.

    Args:
        parts: values by kind.
        longest: the value of a bar that fills its place.
        words: shown where the pointer rests on a part, by kind.
        side: ``"height"`` for a column.
    """
    drawn = (
        f'<i class="{style_name(kind)}" style="{side}:{100 * value / longest:.2f}%"'
        + (f' title="{escape(words[kind])}"' if kind in words else "")
        + "></i>"
        for kind, value in parts.items()
        if value > 0
    )
    return "".join(drawn)


def bar(
    parts: Mapping[str, float], *, longest: float, words: Mapping[str, str] | None = None
) -> str:
    """Return a horizontal bar; arguments are those of ``bar_parts``."""
    return f'<div class="bar">{bar_parts(parts, longest=longest, words=words or {})}</div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBar:
    """A bar of a timeline."""

    start: float
    end: float
    kind: str
    """Name of its colour."""

    label: str = ""
    """Text inside the bar."""

    words: str = ""
    """Text shown where the pointer rests on the bar."""

    half: int | None = None
    """0 for the upper half of the lane, 1 for the lower half; None for its whole height."""


def timeline(lanes: Iterable[tuple[str, Iterable[TimelineBar]]], end: float, *, title: str) -> str:
    """Return lanes of bars, with time from left to right.

    Args:
        lanes: the name of each lane, and its bars. A lane without a name is thinner.
        end: the time at the right end.
        title: what is drawn, for screen readers.
    """
    rows = "\n".join(
        f'<div class="lane{"" if name else " thin"}"><span>{escape(name)}</span>'
        f"<div>{''.join(_timeline_bar(each, end) for each in bars)}</div></div>"
        for name, bars in lanes
    )
    return f'<div class="timeline" role="img" aria-label="{escape(title)}">\n{rows}\n</div>'


def _timeline_bar(each: TimelineBar, end: float) -> str:
    words = f' title="{escape(each.words)}"' if each.words else ""
    place = "" if each.half is None else f";top:{50 * each.half}%;height:50%"
    return (
        f'<i class="{style_name(each.kind)}" style="left:{100 * each.start / end:.2f}%;'
        f'width:{100 * (each.end - each.start) / end:.2f}%{place}"{words}>'
        f"{escape(each.label)}</i>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a plot: the range of its values, and the ticks with their text."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Values and their text. The first and the last value are the ends of the axis."""

    is_logarithmic: bool = False

    def has(self, value: float) -> bool:
        """Return whether a value lies on the axis."""
        return self.ticks[0][0] <= value <= self.ticks[-1][0]

    def place(self, value: float) -> float:
        """Return the place of a value: 0 is the first tick, 100 the last; one tick alone is 50."""
        of: Callable[[float], float] = math.log if self.is_logarithmic else float
        first, last = of(self.ticks[0][0]), of(self.ticks[-1][0])
        return 100 * (of(value) - first) / (last - first) if last > first else 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point with words that are shown where the pointer rests on it."""

    x: float
    y: float
    kind: str
    words: str


def linear_axis(label: str, highest: float, *, lowest: float = 0.0) -> Axis:
    """Return an axis with round numbers from ``lowest`` or less to ``highest`` or more."""
    ticks = round_ticks(lowest, highest)
    return Axis(label=label, ticks=[(tick, f"{tick:,.6g}") for tick in ticks])


def round_ticks(lowest: float, highest: float) -> list[float]:
    """Return round numbers whose range includes both values."""
    span = highest - lowest or abs(highest) or 1.0
    step = 10.0 ** math.floor(math.log10(span / _NUM_TICKS))
    step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= _NUM_TICKS)
    start = math.floor(lowest / step)
    end = max(math.ceil(highest / step), start + 1)
    return [number * step for number in range(start, end + 1)]


def plot(x: Axis, y: Axis, drawn: str, *, title: str, dots: Sequence[Dot] = ()) -> str:
    """Return a frame with axes.

    Args:
        x: the axis below.
        y: the axis at the left.
        drawn: SVG inside the frame. Both axes go from 0 to 100, and y goes down.
        title: what is drawn, for screen readers.
        dots: at values of the axes.
    """
    grid = "".join(f"M0 {100 - y.place(tick):.2f}H100" for tick, _ in y.ticks)
    marks = "".join(_marks(x, y, dots))
    return (
        f'<div class="chart">\n<p class="axis-label">{escape(y.label)}</p>\n<div class="plot">'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{drawn}<path class="grid" d="{grid}"/></svg>\n'
        f'{marks}</div>\n<p class="axis-label under">{escape(x.label)}</p>\n</div>'
    )


def _marks(x: Axis, y: Axis, dots: Sequence[Dot]) -> Iterator[str]:
    for axis, name, side in ((y, "y", "bottom"), (x, "x", "left")):
        for tick, text in axis.ticks:
            place = axis.place(tick)
            yield f'<span class="{name}" style="{side}: {place:.2f}%">{escape(text)}</span>'
    for dot in dots:
        yield (
            f'<i class="dot {style_name(dot.kind)}" style="left: {x.place(dot.x):.2f}%; '
            f'bottom: {y.place(dot.y):.2f}%" title="{escape(dot.words)}"></i>'
        )


def polyline(x: Axis, y: Axis, points: Sequence[tuple[float, float]], *, style: str) -> str:
    """Return a line through values of the axes, as SVG for ``plot``."""
    places = " ".join(f"{x.place(a):.2f},{100 - y.place(b):.2f}" for a, b in points)
    return f'<polyline class="{style}" points="{places}"/>'


def marker(*, x: float | None = None, y: float | None = None, style: str, words: str = "") -> str:
    """Return a straight line across a plot at a place of one axis, as SVG for ``plot``."""
    x1, x2 = (0.0, 100.0) if x is None else (x, x)
    y1, y2 = (0.0, 100.0) if y is None else (100 - y, 100 - y)
    title = f"<title>{escape(words)}</title>" if words else ""
    return (
        f'<line class="{style}" x1="{x1:.2f}" x2="{x2:.2f}" y1="{y1:.2f}" y2="{y2:.2f}">{title}'
        "</line>"
    )


def _style(name: str) -> str:
    return f' class="{name}"' if name else ""
