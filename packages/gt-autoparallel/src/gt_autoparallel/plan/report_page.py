"""A plan as one HTML file that needs no network and no script, in light and dark, on a phone too.

Layers that are alike are drawn once. Whatever is hidden opens on click, by ``details``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from pathlib import Path

from torch.distributed.tensor import Partial

from gt_autoparallel.argument_checks import check_arguments, path_problem
from gt_autoparallel.graph.layer_names import window_name
from gt_autoparallel.graph.layer_turns import computing_nodes
from gt_autoparallel.graph.layouts import MeshShape, local_shape, shard_counts, short_text
from gt_autoparallel.plan.numbers_as_text import size_text, us_text
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.plan.plan_picture import (
    DrawnLayer,
    DrawnMove,
    DrawnParameter,
    DrawnTensor,
    drawn_layers,
    times_in_full,
    windows_of_layers,
)
from gt_autoparallel.plan.report import PlanReport, ReportTable, plan_report
from gt_autoparallel.prices.layer_memory import layer_memory
from gt_config.pages import bar, bar_parts, html_page, key, table

_KEY = {
    "held": "what rank 0 holds",
    "sum": "a sum that ranks hold parts of",
    "compute": "compute",
    "hidden": "communication",
    "exposed": "communication that nothing hides",
}
COLOURS = {
    "held": "#3b7dd8",
    "sum": "#e08a2b",
    "compute": "#3a9d5d",
    "hidden": "#9b5fc0",
    "exposed": "#d0453e",
    "parameters": "#3b7dd8",
    "gradients": "#b8437f",
    "optimizer state": "#2aa3a3",
    "saved activations": "#d9b93b",
    "recomputed": "#6b5bd2",
    "loss": "#e59aa5",
    "gathered ahead": "#7a8794",
    "in flight": "#a6553a",
}
"""Colours by kind. Those that timelines of pipelines have too are the same there."""


def report_page(plan: PlacementPlan, *, reasons: Mapping[str, object] | None = None) -> str:
    """An HTML document that draws a plan, and has everything that the text report has.

    Args:
        plan: the plan.
        reasons: why parameters lie as they do, by their names, as ``next_best_layouts`` finds out
            in seconds and ``explain_parameters`` in full: text that a click on the drawing of the
            parameter shows. None shows none.
    """
    report = plan_report(plan)
    layers = (_layer(each, plan.mesh, reasons or {}) for each in drawn_layers(plan))
    body = [
        _head(report),
        key(_KEY),
        _section("Time of a step", _time(plan)),
        _section("Memory of each rank", _memory(plan)),
        _section("Layers", "\n".join(layers)),
        "<details>\n<summary>All numbers</summary>",
        *(_table(each) for each in report.tables),
        "</details>",
    ]
    return html_page(report.title, body, style=_STYLE, colours=COLOURS)


def write_report_page(
    plan: PlacementPlan,
    path: str | os.PathLike[str],
    *,
    reasons: Mapping[str, object] | None = None,
) -> Path:
    """Write ``report_page`` to a file; its folder is made if missing.

    Raises:
        PlacementInputError: an argument is not what it must be.
        OSError: the file cannot be written.
    """
    check_arguments("write_report_page", plan_problem(plan), path_problem(path))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report_page(plan, reasons=reasons), encoding="utf-8")
    return target


def _head(report: PlanReport) -> str:
    items = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in report.summary
    )
    return f"<h1>{escape(report.title)}</h1>\n<dl>\n{items}\n</dl>"


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _time(plan: PlacementPlan) -> str:
    """Two bars for each kind of window: what computes, and under it what moves meanwhile."""
    windows = list(windows_of_layers(plan))
    in_full = times_in_full(plan)
    longest = max([*(max(w[2:]) for w in windows), *in_full.values()], default=0.0) or 1.0
    rows = []
    for name, count, compute_us, communication_us in windows:
        hidden_us = min(compute_us, communication_us)
        bars: list[Mapping[str, float]] = [
            {"compute": compute_us},
            {"hidden": hidden_us, "exposed": communication_us - hidden_us},
        ]
        words = f"computes {us_text(compute_us)}, moves {us_text(communication_us)}"
        rows.append(_bars(name, count, words, bars, longest))
    rows += [
        _bars(name, 1, f"move {us_text(time_us)}", [{"exposed": time_us}], longest)
        for name, time_us in in_full.items()
    ]
    return '<div class="bars">\n' + "\n".join(rows) + "\n</div>"


def _bars(
    name: str,
    count: int,
    words: str,
    bars: Sequence[Mapping[str, float]],
    longest: float,
) -> str:
    drawn = "".join(bar(each, longest=longest) for each in bars)
    return (
        f'<div class="row"><div>{escape(name)}{_times(count)}</div>'
        f'<div title="{escape(words)}">{drawn}</div><div class="words">{escape(words)}</div></div>'
    )


def _memory(plan: PlacementPlan) -> str:
    """One bar of all kinds, as long as the budget if there is one."""
    budget = plan.request.memory_budget_bytes
    longest = max(plan.memory.total, budget or 0, 1)
    parts = plan.memory.parts
    words = {kind: f"{kind}: {size_text(size)}" for kind, size in parts.items()}
    names = {kind: f"{kind} {size_text(size)}" for kind, size in parts.items()}
    left = () if budget is None else (f"the bar is the budget, {size_text(budget)}",)
    return (
        f'<div class="memory">{bar(parts, longest=longest, words=words)}</div>\n'
        f"{key(names, *left)}\n{_memory_over_step(plan)}"
    )


def _memory_over_step(plan: PlacementPlan) -> str:
    """A column of kinds for each layer forward, then backward, as high as the largest."""
    moments = memory_over_step(plan)
    highest = max([1, *(each.total for each in moments)])
    columns = "\n".join(_column(each, highest) for each in moments)
    first, last = moments[0].window, moments[-1].window
    not_drawn = ", without what is in flight" if plan.memory.in_flight else ""
    return (
        f'<div class="step" role="img" aria-label="memory of each rank over a step">\n{columns}\n'
        f'</div>\n<p class="note">from {escape(first)} to {escape(last)}; at most '
        f"{size_text(highest)}{not_drawn}</p>"
    )


def _column(moment: MemoryAt, highest: int) -> str:
    words = ", ".join(f"{kind} {size_text(size)}" for kind, size in moment.parts.items() if size)
    parts = bar_parts(moment.parts, longest=highest, words={}, side="height")
    return f'<div title="{escape(f"{moment.window}: {words}")}">{parts}</div>'


def _layer(layer: DrawnLayer, mesh: MeshShape, reasons: Mapping[str, object]) -> str:
    parts = [f"<h3>{escape(layer.name)}{_times(layer.count)}</h3>"]
    parts += [_parameter(each, mesh, reasons) for each in layer.parameters]
    if layer.activations:
        moves = "\n".join(_move(each, mesh) for each in layer.activations)
        total_us = sum(each.time_us for each in layer.activations)
        parts.append(
            f"<details open>\n<summary>activations move {len(layer.activations)} times, "
            f"{us_text(total_us)} that nothing hides</summary>\n{moves}\n</details>"
        )
    return "<article>\n" + "\n".join(parts) + "\n</article>"


def _parameter(parameter: DrawnParameter, mesh: MeshShape, reasons: Mapping[str, object]) -> str:
    """Stored, gathered for use, and back: the gradient's way is under the weight's."""
    tensor = parameter.tensor
    ways = "".join(_way(each, mesh) for each in parameter.moves)
    reason = reasons.get(parameter.full_name)
    drawing = tensor_drawing(tensor, mesh)
    if reason is not None:
        drawing = (
            f'<details class="why"><summary>{drawing} why</summary>'
            f"<pre>{escape(str(reason))}</pre></details>"
        )
    return (
        f'<div class="tensor-row"><div class="name"><b>{escape(parameter.name)}</b><br/>'
        f'{_tensor_words(tensor)}</div>{drawing}<div class="ways">{ways}</div></div>'
    )


def _move(move: DrawnMove, mesh: MeshShape) -> str:
    return (
        f'<div class="tensor-row"><div class="name"><b>{escape(move.name)}</b> {move.phase}<br/>'
        f"{_tensor_words(move.source)} to {short_text(move.target.layout)}</div>"
        f'{tensor_drawing(move.source, mesh)}<div class="ways">{_way(move, mesh)}</div></div>'
    )


def _way(move: DrawnMove, mesh: MeshShape) -> str:
    """An arrow with what is launched, to the tensor as it is wanted."""
    steps = ", ".join(
        f"{step.kind.replace('_', '-')} {step.axis} {size_text(step.num_bytes)}"
        for step in move.steps
    )
    kind = "hidden" if move.may_hide else "exposed"
    words = steps if move.purpose == "activation" else f"{move.purpose}: {steps}"
    # What is stored, and an activation, stand left of all arrows; a gradient has stood nowhere yet.
    source = tensor_drawing(move.source, mesh) if move.purpose == "reduce gradient" else ""
    return (
        f'<div class="way {kind}"><span>{escape(words)}<br/>{us_text(move.time_us)}'
        f"{' behind compute' if move.may_hide else ''}</span>{source}"
        '<svg class="arrow" viewBox="0 0 60 10" width="60" height="10" aria-hidden="true">'
        f'<path fill="none" stroke="{COLOURS[kind]}" stroke-width="2" d="M0 5h52M47 1l7 4l-7 4"/>'
        "</svg>"
        f"{tensor_drawing(move.target, mesh)}</div>"
    )


def _tensor_words(tensor: DrawnTensor) -> str:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return (
        f"{tensor.dtype} {shape}, {short_text(tensor.layout)}, {size_text(tensor.local_bytes)} "
        "on each rank"
    )


def _times(count: int) -> str:
    return f' <span class="times">x {count}</span>' if count > 1 else ""


def _table(shown: ReportTable) -> str:
    parts = [f"<h2>{escape(shown.title)}</h2>"]
    if shown.rows:
        numbers = range(shown.num_text_columns, len(shown.header))
        parts.append(table(shown.rows, shown.header, numbers=numbers, style_of=_tint))
    if shown.note:
        parts.append(f'<p class="note">{escape(shown.note)}</p>')
    return "\n".join(parts)


def _tint(cell: str) -> str:
    if cell.startswith("S("):
        return "shard"
    return "partial" if cell.startswith("P(") else ""


_STYLE = """
body { font-size: 14px; max-width: 1100px } h3 { margin: 0 0 .6rem; font-size: 1rem }
dl { display: flex; flex-wrap: wrap; gap: .6rem } dd { margin: 0; font-weight: 600 }
dl div { border: 1px solid var(--faint); border-radius: 6px; padding: .4rem .8rem }
dt, .words, .times, p.note { opacity: .75 }
.row { display: grid; grid-template-columns: 15rem 1fr 20rem; gap: .2rem 1rem; align-items: center;
  padding: .25rem 0; border-bottom: 1px solid var(--faint); overflow-wrap: anywhere }
.row .bar { height: .8rem; margin: 1px 0 }
.memory .bar { height: 1.6rem; border: 1px solid var(--faint) }
.step { display: flex; align-items: flex-end; height: 9rem; border-bottom: 1px solid var(--faint) }
.step div { flex: 1; height: 100%; display: flex; flex-direction: column-reverse }
.step i { display: block }
article { border: 1px solid var(--faint); border-radius: 6px; padding: .8rem; margin: .8rem 0 }
.tensor-row { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center;
  padding: .4rem 0; border-top: 1px solid var(--faint) }
.tensor-row .name { flex: 1 1 16rem; overflow-wrap: anywhere } .ways { flex: 2 1 20rem }
.tensor-row .why[open] { flex-basis: 100%; order: 1 }
.way { display: flex; gap: .8rem; align-items: center; margin: .2rem 0 }
.way span { flex: 1; text-align: right; font-size: .9em; overflow-wrap: anywhere }
.shards, .arrow { flex: none } summary { cursor: pointer; padding: .2rem 0 }
td.shard { background: #3b7dd833 } td.partial { background: #e08a2b33 }
@media (max-width: 700px) { .row { grid-template-columns: 1fr } }
""".strip()


# What a rank's memory holds while a step runs: for each layer forward and backward, by kind.
#
# Bytes are those of ``prices.memory``. A layer's saved activations live from its forward to the
# end of its backward. What it recomputes or gathers ahead lives during its backward. The loss is
# between the two. A layer's gradients live from its backward on, those of earlier microbatches
# all the time, like everything else. Gradients in flight to their reduction are not drawn.
_FORWARD, _BACKWARD = " forward", " backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAt:
    """Bytes of a rank at the end of a forward window, or at the beginning of a backward one."""

    window: str
    """``"layers.3 forward"``: as ``PlannedWindow.name``; or ``"loss"``."""

    parts: Mapping[str, int]
    """Bytes by kind, as ``MemoryBreakdown.parts``."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(self.parts.values())


def memory_over_step(plan: PlacementPlan) -> tuple[MemoryAt, ...]:
    """The windows of forward and backward in the order in which they run.

    Of layers that run more than once, as they begin in the forward and end in the backward.
    """
    of_layers = layer_memory(
        plan.graph,
        plan.options,
        plan.mesh,
        recomputed=plan.recomputed,
        microbatches=plan.request.microbatches,
    )
    saved = 0
    found = []
    forward, backward = _windows_in_order(plan)
    for window in forward:
        saved += of_layers.saved.get(window.removesuffix(_FORWARD), 0)
        found.append(_at(window, plan.memory.at_loss, saved))
    if plan.memory.loss:
        found.append(_at("loss", plan.memory.at_loss, saved, loss=plan.memory.loss))
    to_come = sum(of_layers.gradients.values())
    for window in backward:
        layer = window.removesuffix(_BACKWARD)
        to_come -= of_layers.gradients.get(layer, 0)
        again, ahead = (of.get(layer, 0) for of in (of_layers.again, of_layers.ahead))
        gradients = plan.memory.gradients - to_come
        moment = {**plan.memory.in_backward, "gradients": gradients}
        found.append(_at(window, moment, saved, recomputed=again, ahead=ahead))
        saved -= of_layers.saved.get(layer, 0)
    return tuple(found)


def _windows_in_order(plan: PlacementPlan) -> tuple[list[str], list[str]]:
    """Names of windows of the forward and of the backward; what computes nothing stands first."""
    place: dict[str, int] = {}
    computing = computing_nodes(plan.graph)
    for node in reversed(computing["forward"]):
        place[window_name(node)] = node.index
    for node in computing["backward"]:
        place[window_name(node)] = node.index
    names = sorted((window.name for window in plan.windows), key=lambda name: place.get(name, 0))
    return (
        [name for name in names if name.endswith(_FORWARD)],
        [name for name in names if name.endswith(_BACKWARD)],
    )


def _at(
    window: str,
    moment: Mapping[str, int],
    saved: int,
    *,
    loss: int = 0,
    recomputed: int = 0,
    ahead: int = 0,
) -> MemoryAt:
    """Return the bytes that a ``moment`` of the plan always holds, with those of this window."""
    passing = {"loss": loss, "recomputed": recomputed, "gathered ahead": ahead}
    parts = {**moment, "saved activations": saved, **passing}
    always = ("parameters", "optimizer state", "saved activations")
    return MemoryAt(
        window=window, parts={kind: size for kind, size in parts.items() if size or kind in always}
    )


# As attributes, so that any viewer of SVG has them; ``currentColor`` is light in the dark.
# A tensor as a small drawing: its cuts as lines, and what rank 0 holds filled.
_PAINT = {
    "tensor": 'fill="#888" fill-opacity=".13" stroke="currentColor" stroke-opacity=".5"',
    "held": 'fill="#3b7dd8"',
    "sum": 'fill="#e08a2b"',
    "cut": 'stroke="currentColor" stroke-opacity=".6" stroke-width=".7"',
}
_LONGEST, _SHORTEST = 64.0, 16.0
_SHEET = 4.0
_MAX_SHEETS, _MAX_LINES = 4, 16


def tensor_drawing(tensor: DrawnTensor, mesh: MeshShape) -> str:
    """An SVG of a tensor as the mesh cuts it.

    The first dim goes down and the last one across; what is cut along those between lies behind one
    another. Dims of one element are not drawn, so that a vector always goes down. A tensor that
    every rank holds whole is filled, and one of which ranks hold parts of a sum has another colour.
    Where there are too many cuts to see, some are drawn.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    rows, columns = _sides(tuple(tensor.shape[dim] for dim in dims))
    cuts = shard_counts(len(tensor.shape), tensor.layout, mesh)
    counts = [cuts[dim] for dim in dims]
    down = counts[0] if counts else 1
    across = counts[-1] if len(counts) > 1 else 1
    behind = prod(counts[1:-1])
    sheets = min(behind, _MAX_SHEETS)
    width, height = columns + _SHEET * (sheets - 1), rows + _SHEET * (sheets - 1)
    kind = "sum" if any(isinstance(p, Partial) for p in tensor.layout) else "held"
    parts = []
    for sheet in reversed(range(sheets)):
        left, top = _SHEET * sheet, _SHEET * (sheets - 1 - sheet)
        parts.append(_box("tensor", left, top, columns, rows))
        if sheet == 0:
            parts.append(_box(kind, left, top, columns / across, rows / down))
            parts += _lines(left, top, columns, rows, across=across, down=down)
    label = escape(_words(tensor, mesh))
    return (
        f'<svg class="shards" width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(parts)}</svg>"
    )


def _sides(shape: tuple[int, ...]) -> tuple[float, float]:
    """Height and width; a vector is a bar that is cut down its length."""
    if not shape:
        return _SHORTEST, _SHORTEST
    if len(shape) == 1:
        return _LONGEST, _SHORTEST / 2
    first, last = max(shape[0], 1), max(shape[-1], 1)
    longest = max(first, last)
    # Square roots: else a matrix of 8 x 4096 would be a line.
    height, width = (max(_SHORTEST, _LONGEST * (side / longest) ** 0.5) for side in (first, last))
    return height, width


def _box(kind: str, left: float, top: float, width: float, height: float) -> str:
    return (
        f'<rect {_PAINT[kind]} x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"/>'
    )


def _lines(
    left: float, top: float, width: float, height: float, *, across: int, down: int
) -> list[str]:
    lines = [
        f'<path {_PAINT["cut"]} d="M{left + width * at:.1f} {top:.1f}v{height:.1f}"/>'
        for at in _cuts(across)
    ]
    return lines + [
        f'<path {_PAINT["cut"]} d="M{left:.1f} {top + height * at:.1f}h{width:.1f}"/>'
        for at in _cuts(down)
    ]


def _cuts(count: int) -> list[float]:
    drawn = min(count, _MAX_LINES)
    return [number / drawn for number in range(1, drawn)]


def _words(tensor: DrawnTensor, mesh: MeshShape) -> str:
    placements = ", ".join(
        f"{short_text((placement,))} along {name} {size}"
        for name, size, placement in zip(mesh.names, mesh.sizes, tensor.layout, strict=True)
    )
    local = list(local_shape(tensor.shape, tensor.layout, mesh))
    return f"{tensor.dtype}{list(tensor.shape)}, {placements}: {local} on each rank"
