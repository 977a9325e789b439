"""The graph of a run by its layers: what each has of the forward, the backward and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

KINDS = ("forward", "loss", "backward", "optimizer", "collectives", "no phase")
"""In the order of the bars."""

_WIDTH = 480
_HEIGHT = 14


def layer_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """A table with a bar for each layer; neighbours that are equal have one row.

    Args:
        counts: operators by layer and kind, in the order of the graph.
    """
    kinds = [kind for kind in KINDS if any(kind in each for each in counts.values())]
    rows = [*_rows(counts)]
    largest = max((sum(each.values()) for _, each in rows), default=1)
    header = "".join(f"<th>{_swatch(kind)} {escape(kind)}</th>" for kind in kinds)
    lines = [f"<tr><th>layer</th><th>operators</th>{header}</tr>"]
    for name, found in rows:
        numbers = "".join(f"<td class=number>{found.get(kind, 0):,}</td>" for kind in kinds)
        bar = _bar([(kind, found.get(kind, 0)) for kind in kinds], largest=largest)
        lines.append(f"<tr><td>{escape(name)}</td><td>{bar}</td>{numbers}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _rows(counts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Layers, of equal neighbours the first and the last in one row."""
    run: list[str] = []
    for name, found in counts.items():
        if run and not (counts[run[0]] == found and _stem(run[0]) == _stem(name) != ""):
            yield _named(run), counts[run[0]]
            run = []
        run.append(name)
    if run:
        yield _named(run), counts[run[0]]


def _stem(name: str) -> str:
    """What a numbered layer is called before its number; nothing of another."""
    stem, _, number = name.rpartition(".")
    return stem if number.isdigit() else ""


def _named(run: list[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}, each"


def _swatch(kind: str) -> str:
    return (
        f'<svg class="swatch" viewBox="0 0 10 10">{_part(kind, start=0, width=10, height=10)}</svg>'
    )


def _bar(parts: list[tuple[str, int]], *, largest: int) -> str:
    drawn, start = [], 0.0
    for kind, count in parts:
        width = _WIDTH * count / largest
        drawn.append(_part(kind, start=start, width=width, height=_HEIGHT))
        start += width
    return f'<svg class="bar" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(drawn)}</svg>'


def _part(kind: str, *, start: float, width: float, height: int) -> str:
    return (
        f'<rect class="part{KINDS.index(kind)}" x="{start:.1f}" width="{width:.1f}" '
        f'height="{height}"/>'
    )
