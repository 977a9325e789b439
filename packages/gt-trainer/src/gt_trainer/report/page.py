"""The page of a run: one HTML file that needs no network, on any screen, light or dark."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from gt_config.pages import (
    Axis,
    Markup,
    bar,
    html_page,
    key,
    linear_axis,
    marker,
    plot,
    polyline,
    table,
)
from gt_trainer.report.dump_folder import RunRecord

_STYLE = """
:root { --line: #2f6fd0 }
@media (prefers-color-scheme: dark) { :root { --line: #7fb0ff } }
.charts { display: grid; gap: 1rem 2rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)) }
figcaption { font-weight: 600 } code { overflow-wrap: anywhere }
polyline { fill: none; stroke: var(--line); stroke-width: 1.6; stroke-linecap: round }
.restart { stroke: #d0612f; stroke-width: 1.5; stroke-dasharray: 5 4 }
td .bar { width: 30rem; max-width: 40vw }
""".strip()

_CHARTS = (
    ("loss", "loss", "nats a token", False),
    ("tokens_per_second", "throughput", "tokens a second, all ranks", True),
    ("memory_gib", "memory", "GiB, peak of a rank", True),
    ("grad_norm", "gradient norm", "before clipping", True),
)
_VALIDATION = ("validation_loss", "validation loss", "nats a token", False)
"""Keys of ``metrics.jsonl``: what they are, their unit, whether 0 is on the axis."""


def report_page(run: RunRecord) -> str:
    """The page as text."""
    title = f"Run {run.folder.resolve().name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _summary(run),
        _charts(run),
        _starts(run.starts),
        _startup(run.startup),
        _captures(run),
        _files(run),
    ]
    return html_page(title, body, style=_STYLE, colours=KINDS)


def _summary(run: RunRecord) -> str:
    start: Mapping[str, Any] = run.starts[-1] if run.starts else {}
    facts: dict[str, object] = {}
    if run.steps:
        last = run.steps[-1]
        of = f" of {start['last_step']}" if "last_step" in start else ""
        facts["steps"] = f"{last['step']:,}{of}"
        facts["loss"] = f"{run.steps[0]['loss']:.5g} at first, {last['loss']:.5g} at the last"
    if run.validations:
        facts["validation loss"] = f"{run.validations[-1]['validation_loss']:.5g} at the last"
    for name in ("model", "device", "num_ranks"):
        if start.get(name) is not None:
            facts[name.replace("num_ranks", "ranks")] = start[name]
    options = start.get("compile") or {}
    if options:
        facts["options"] = " ".join(f"--compile.{name} {value}" for name, value in options.items())
    return table([(name, str(value)) for name, value in facts.items()])


def _charts(run: RunRecord) -> str:
    charts = [(run.steps, *chart) for chart in _CHARTS]
    charts.append((run.validations, *_VALIDATION))
    figures = []
    for records, key_of, title, unit, from_zero in charts:
        points: list[Point] = [(each["step"], each[key_of]) for each in records if key_of in each]
        if points:
            drawn = line_chart(
                points, title=title, unit=unit, marks=run.restarts, from_zero=from_zero
            )
            figures.append(f"<figure><figcaption>{title}</figcaption>\n{drawn}</figure>")
    note = ""
    if run.restarts:
        steps = ", ".join(f"{step:,}" for step in run.restarts)
        note = f"<p>Dashed: started again, before step {steps}.</p>"
    return f'<div class="charts">\n{"".join(figures)}\n</div>\n{note}'


def _starts(starts: Sequence[Mapping[str, Any]]) -> str:
    if not starts:
        return ""
    rows = [
        (
            f"{each['step']:,}",
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each["time"])),
            f"{each.get('num_ranks', '?')} on {each.get('device', '?')}",
        )
        for each in starts
    ]
    return "<h2>Starts</h2>\n" + table(rows, ("first step", "first update began", "ranks"))


def _startup(parts: Mapping[str, float]) -> str:
    rows = [
        (name, f"{seconds:.1f}", f"{parts.get(f'cpu_{name}', 0.0):.1f}")
        for name, seconds in parts.items()
        if not name.startswith("cpu_")
    ]
    if not rows:
        return ""
    return "<h2>Before the first update, of the newest start</h2>\n" + table(
        rows, ("part", "seconds", "processor seconds of rank 0"), numbers=(1, 2)
    )


def _captures(run: RunRecord) -> str:
    if not run.captures:
        return "<h2>Captured</h2>\n<p>Nothing: the run was eager, or kept no record of it.</p>"
    return "\n".join(["<h2>Captured</h2>", *(_capture(each) for each in run.captures)])


def _capture(capture: Mapping[str, Any]) -> str:
    lines = [f"<p>{escape(capture['captured'])}</p>"]
    for records in capture["graphs"]:
        rows = [
            (
                each["pass"],
                "{:,} → {:,}".format(*each["operators"]),
                "{:,} → {:,}".format(*each["collective_bytes"]),
                "; ".join(_what_a_pass_did(each)),
            )
            for each in records
        ]
        lines.append(table(rows, ("pass", "operators", "bytes to collectives", "done")))
        lines.append(_operator_differences(records))
    # Runs of before have none.
    lines += (
        f"<h3>The graph by layer, as it runs</h3>\n{layer_table(each)}"
        for each in capture.get("layers", ())
    )
    lines += _before_and_after(capture.get("by_layer", ()))
    if capture["memory"]:
        lines.append(f"<pre>{escape(capture['memory'])}</pre>")
    return "\n".join(lines)


def _before_and_after(graphs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield tables of the changes that passes made to each captured graph, by layer."""
    known = [each for each in graphs if each["before"] and each["after"]]
    if not known:
        return
    yield (
        "<h3>The graph by layer, before and after its passes</h3>\n"
        "<p>Operators by kind, before anything is compiled. Behind products: collectives that have "
        "a matrix product or attention between their launch and their wait. Memory: given to or "
        "taken from collectives; left by the forward to the backward.</p>"
    )
    for number, each in enumerate(known, start=1):
        shown = before_and_after_table(each["before"], each["after"])
        if len(known) > 1:
            shown = f"<details><summary>Graph {number} of {len(known)}</summary>\n{shown}</details>"
        yield shown


def _operator_differences(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the operators that each pass added or removed; "" without a record or a change."""
    rows = [
        (each["pass"], ", ".join(f"{count:+,} {name}" for name, count in differences.items()))
        for each in records
        if (differences := each.get("operator_differences"))
    ]
    if not rows:
        return ""
    shown = table(rows, ("pass", "operators after it, against before"))
    return f"<details><summary>Operators before and after each pass</summary>\n{shown}\n</details>"


def _what_a_pass_did(record: Mapping[str, Any]) -> Iterator[str]:
    done = [f"{name.replace('_', ' ')} {count:,}" for name, count in record["done"].items()]
    yield ", ".join(done) or "nothing"
    yield from record["refused"]


def _files(run: RunRecord) -> str:
    if not run.files:
        return ""
    rows = [
        (
            Markup(f'<a href="{_address(each.path)}"><code>{escape(each.path)}</code></a>'),
            each.meaning,
        )
        for each in run.files
    ]
    return f"<h2>More</h2>\n{table(rows)}"


def _address(path: str) -> str:
    return quote(path, errors="surrogateescape")


# A line over steps, with axes, and marks where something happened.
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
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    x = Axis(label="step", ticks=[(first, f"{first:g}"), (last, f"{last:g}")])
    y = linear_axis(unit, max(value for _, value in finite), lowest=lowest)
    lines = [
        marker(x=x.place(mark), style="restart", words=f"started again before step {mark:g}")
        for mark in marks
        if first <= mark <= last
    ]
    lines += [polyline(x, y, piece, style="line") for piece in _pieces(_thinned(points))]
    return plot(x, y, "".join(lines), title=title)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most ``_MOST_POINTS`` points: extremes and gaps of each run of points, in order."""
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


# The graph of a run by its layers, as tables: as it runs, and before and after its passes.
KINDS = {
    "forward": "#2f6fd0",
    "loss": "#8a8a8a",
    "backward": "#c98a1b",
    "optimizer": "#5a9b52",
    "collectives": "#b8446c",
    "no phase": "#8884",
}
"""Colours of all kinds, in the order of the bars."""

_BYTES = " bytes"


def layer_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """A table with a bar for each layer; neighbours that are equal have one row.

    Args:
        counts: operators by layer and kind, in the order of the graph.
    """
    kinds = [kind for kind in KINDS if any(kind in each for each in counts.values())]
    rows = [(name, counts[first]) for name, first in _alike_together(counts)]
    largest = max((sum(each.values()) for _, each in rows), default=1) or 1
    lines = []
    for name, found in rows:
        counts_of = {kind: found.get(kind, 0) for kind in kinds}
        drawn = Markup(bar(counts_of, longest=largest))
        lines.append((name, drawn, *(f"{count:,}" for count in counts_of.values())))
    header = ("layer", "operators", *(Markup(key([kind])) for kind in kinds))
    return table(lines, header, numbers=range(2, len(header)))


def before_and_after_table(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> str:
    """A table of what passes changed; neighbours that were and are equal have one row.

    Args:
        before: numbers by layer and by what they are of.
        after: the same after the passes.
    """
    layers = {name: (before.get(name, {}), after.get(name, {})) for name in (*before, *after)}
    columns = {column: None for both in layers.values() for each in both for column in each}
    ordered = sorted(columns, key=lambda column: column.endswith(_BYTES))
    rows = []
    for name, first in _alike_together(layers):
        was, is_now = layers[first]
        cells = (_change(column, was.get(column, 0), is_now.get(column, 0)) for column in ordered)
        rows.append((name, *cells))
    header = ("layer", *map(_headed, ordered))
    return table(rows, header, numbers=range(1, len(header)))


def _headed(column: str) -> str:
    return column.removesuffix(_BYTES) + " MiB" if column.endswith(_BYTES) else column


def _change(column: str, before: int, after: int) -> str:
    was, is_now = (
        f"{each / 2**20:,.2f}" if column.endswith(_BYTES) else f"{each:,}"
        for each in (before, after)
    )
    return was if before == after else Markup(f"<b>{was} → {is_now}</b>")


def _alike_together(layers: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the name and the first layer of each row; equal neighbours share a row."""
    run: list[str] = []
    for name, found in layers.items():
        if run and not (layers[run[0]] == found and _stem(run[0]) == _stem(name) != ""):
            yield _named(run), run[0]
            run = []
        run.append(name)
    if run:
        yield _named(run), run[0]


def _stem(name: str) -> str:
    """Return the name of a numbered layer without its number; "" for any other name."""
    stem, _, number = name.rpartition(".")
    return stem if number.isdigit() else ""


def _named(run: list[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}, each"
