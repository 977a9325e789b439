"""The frame of a drawing: axes with ticks, in which lines scale and text does not.

Lines are SVG that is stretched to the frame; ticks, dots and words are HTML at their places, so
that they have the size of the text around them on a phone and on a wide screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

PLOT_STYLE = """
.plot { position: relative; height: 17rem; margin: .7rem 1rem 1.7rem 3.4rem }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible }
.plot path, .plot polyline, .plot line { vector-effect: non-scaling-stroke }
.plot span { position: absolute; font-size: .8rem; white-space: nowrap; opacity: .8 }
.plot .y { right: 100%; padding-right: .4rem; transform: translateY(50%) }
.plot .x { top: 100%; padding-top: .2rem; transform: translateX(-50%) }
.plot .dot { position: absolute; width: .65rem; height: .65rem; border-radius: 50%;
  transform: translate(-50%, 50%) }
.grid { stroke: currentColor; stroke-opacity: .18; fill: none }
figure { margin: 0 }
.axis-label { font-size: .85rem; margin: 0 } .under { text-align: right }
""".strip()
"""What ``plot`` needs of a page's style sheet."""

_NUM_TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From where to where, with what at which place."""

    label: str
    ticks: Sequence[tuple[float, str]]
    """Values, the first and the last being the ends, and how they are written."""

    is_logarithmic: bool = False

    def has(self, value: float) -> bool:
        """Whether a value is on it."""
        return self.ticks[0][0] <= value <= self.ticks[-1][0]

    def place(self, value: float) -> float:
        """Where a value is, from 0 at the first tick to 100 at the last; of one tick, 50."""
        of: Callable[[float], float] = math.log if self.is_logarithmic else float
        first, last = of(self.ticks[0][0]), of(self.ticks[-1][0])
        return 100 * (of(value) - first) / (last - first) if last > first else 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point with words that are shown where the pointer rests on it."""

    x: float
    y: float
    style: str
    words: str


def linear_axis(label: str, highest: float) -> Axis:
    """From 0, with round numbers, to the first one that is no less than ``highest``."""
    ticks = round_ticks(0.0, highest)
    return Axis(label=label, ticks=[(tick, f"{tick:,.6g}") for tick in ticks])


def round_ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers around all values."""
    span = highest - lowest or abs(highest) or 1.0
    step = 10.0 ** math.floor(math.log10(span / _NUM_TICKS))
    step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= _NUM_TICKS)
    start = math.floor(lowest / step)
    end = max(math.ceil(highest / step), start + 1)
    return [number * step for number in range(start, end + 1)]


def plot(x: Axis, y: Axis, drawn: str, *, title: str, dots: Sequence[Dot] = ()) -> str:
    """Draw a frame.

    Args:
        x: the axis below.
        y: the axis at the left.
        drawn: SVG inside of the frame, where both axes go from 0 to 100 and y goes down.
        title: what is drawn, for those who cannot see it.
        dots: by the values of the axes.
    """
    grid = "".join(f"M0 {100 - y.place(tick):.2f}H100" for tick, _ in y.ticks)
    ticks = [
        f'<span class="y" style="bottom: {y.place(tick):.2f}%">{escape(text)}</span>'
        for tick, text in y.ticks
    ]
    ticks += [
        f'<span class="x" style="left: {x.place(tick):.2f}%">{escape(text)}</span>'
        for tick, text in x.ticks
    ]
    points = [
        f'<i class="dot {each.style}" style="left: {x.place(each.x):.2f}%; '
        f'bottom: {y.place(each.y):.2f}%" title="{escape(each.words)}"></i>'
        for each in dots
    ]
    return (
        f'<div class="chart">\n<p class="axis-label">{escape(y.label)}</p>\n<div class="plot">'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{drawn}<path class="grid" d="{grid}"/></svg>\n'
        f"{''.join((*ticks, *points))}</div>\n"
        f'<p class="axis-label under">{escape(x.label)}</p>\n</div>'
    )


def polyline(x: Axis, y: Axis, points: Sequence[tuple[float, float]], *, style: str) -> str:
    """A line through points that are given by the values of the axes, as SVG for ``plot``."""
    places = " ".join(f"{x.place(a):.2f},{100 - y.place(b):.2f}" for a, b in points)
    return f'<polyline class="{style}" points="{places}"/>'
