"""A line over steps, with axes, and marks where something happened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from gt_trainer.plot import Axis, plot, polyline, round_ticks

_MOST_POINTS = 1000

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
    ticks = round_ticks(lowest, max(value for _, value in finite))
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    x = Axis(label="step", ticks=[(first, f"{first:g}"), (last, f"{last:g}")])
    y = Axis(label=unit, ticks=[(tick, f"{tick:,.6g}") for tick in ticks])
    lines = [
        f'<line class="restart" x1="{x.place(mark):.2f}" x2="{x.place(mark):.2f}" y1="0" '
        f'y2="100"><title>started again before step {mark:g}</title></line>'
        for mark in marks
        if first <= mark <= last
    ]
    lines += [polyline(x, y, piece, style="line") for piece in _pieces(_thinned(points))]
    return plot(x, y, "".join(lines), title=title)


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
