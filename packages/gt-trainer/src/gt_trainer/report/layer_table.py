"""The graph of a run by its layers, as tables: as it runs, and before and after its passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

KINDS = ("forward", "loss", "backward", "optimizer", "collectives", "no phase")
"""In the order of the bars."""

_WIDTH = 480
_HEIGHT = 14
_BYTES = " bytes"


def layer_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """A table with a bar for each layer; neighbours that are equal have one row.

    Args:
        counts: operators by layer and kind, in the order of the graph.
    """
    kinds = [kind for kind in KINDS if any(kind in each for each in counts.values())]
    rows = [(name, counts[first]) for name, first in _alike_together(counts)]
    largest = max((sum(each.values()) for _, each in rows), default=1) or 1
    header = "".join(f"<th>{_swatch(kind)} {escape(kind)}</th>" for kind in kinds)
    lines = [f"<tr><th>layer</th><th>operators</th>{header}</tr>"]
    for name, found in rows:
        numbers = "".join(f"<td class=number>{found.get(kind, 0):,}</td>" for kind in kinds)
        bar = _bar([(kind, found.get(kind, 0)) for kind in kinds], largest=largest)
        lines.append(f"<tr><td>{escape(name)}</td><td>{bar}</td>{numbers}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def before_and_after_table(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> str:
    """A table of what passes changed; neighbours that were and are equal have one row.

    Args:
        before: numbers by layer and by what they are of.
        after: likewise.
    """
    layers = {name: (before.get(name, {}), after.get(name, {})) for name in (*before, *after)}
    columns = {column: None for both in layers.values() for each in both for column in each}
    ordered = sorted(columns, key=lambda column: column.endswith(_BYTES))
    header = "".join(f"<th>{escape(_headed(column))}</th>" for column in ordered)
    lines = [f"<tr><th>layer</th>{header}</tr>"]
    for name, first in _alike_together(layers):
        was, is_now = layers[first]
        cells = (_change(column, was.get(column, 0), is_now.get(column, 0)) for column in ordered)
        numbers = "".join(f"<td class=number>{cell}</td>" for cell in cells)
        lines.append(f"<tr><td>{escape(name)}</td>{numbers}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _headed(column: str) -> str:
    return column.removesuffix(_BYTES) + " MiB" if column.endswith(_BYTES) else column


def _change(column: str, before: int, after: int) -> str:
    was, is_now = (
        f"{each / 2**20:,.2f}" if column.endswith(_BYTES) else f"{each:,}"
        for each in (before, after)
    )
    return was if before == after else f"<b>{was} → {is_now}</b>"


def _alike_together(layers: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What rows are called, and the first layer of each; equal neighbours have one."""
    run: list[str] = []
    for name, found in layers.items():
        if run and not (layers[run[0]] == found and _stem(run[0]) == _stem(name) != ""):
            yield _named(run), run[0]
            run = []
        run.append(name)
    if run:
        yield _named(run), run[0]


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
