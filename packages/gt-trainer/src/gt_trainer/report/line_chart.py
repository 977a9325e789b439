"""A line over steps as SVG, with an axis, and marks where something happened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_MOST_POINTS = 1000
_NUM_TICKS = 4

Point = tuple[float, float]


def line_chart(
    points: Sequence[Point], *, title: str, unit: str, marks: Sequence[float] = (), from_zero: bool
) -> str:
    """Draw a line.

    Args:
        points: (step, value), by step. Values that are not finite leave a gap.
        title: what is drawn, for those who cannot see it.
        unit: of the values, at the axis.
        marks: steps before which a dashed line stands.
        from_zero: whether the axis begins at 0.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return f"<p>No {escape(title)} that is a number.</p>"
    lowest = 0.0 if from_zero else min(value for _, value in finite)
    ticks = _ticks(lowest, max(value for _, value in finite))
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        *(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/>'
            f'<text class="value" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:,.6g}</text>'
            for tick in ticks
        ),
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">step {first:g}</text>',
        f'<text class="value" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}">{points[-1][0]:g}</text>',
        f'<text x="{_LEFT + 4}" y="{_TOP + 2}">{escape(unit)}</text>',
        *(
            f'<line class="restart" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"><title>started again before step {mark:g}</title></line>'
            for mark in marks
            if first <= mark <= last
        ),
        *(
            f'<polyline points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in piece)}"/>'
            for piece in _pieces(_thinned(points))
        ),
        "</svg>",
    ]
    return "\n".join(lines)


def _ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers around all values."""
    span = highest - lowest or abs(highest) or 1.0
    step = 10.0 ** math.floor(math.log10(span / _NUM_TICKS))
    step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= _NUM_TICKS)
    start = math.floor(lowest / step)
    end = max(math.ceil(highest / step), start + 1)
    return [number * step for number in range(start, end + 1)]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most so many: of each run of points its lowest, highest and worst, in their order."""
    if len(points) <= _MOST_POINTS:
        return [*points]
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        finite = [each for each in some if math.isfinite(each[1])]
        gaps = [each for each in some if not math.isfinite(each[1])][:1]
        ends = [min(finite, key=_value), max(finite, key=_value)] if finite else []
        kept += sorted({*ends, *gaps})
    return kept


def _value(point: Point) -> float:
    return point[1]


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The line between gaps; a point alone is a short line."""
    piece: list[Point] = []
    for point in [*points, (math.inf, math.nan)]:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece if len(piece) > 1 else [piece[0], piece[0]]
            piece = []
