"""A plan for people: what is placed how, what it sends, what it takes and what it costs.

``plan_report`` gathers the tables; ``str`` writes them for a terminal, and ``report_page`` for a
browser. Repeated layers stand in one row. The same plan gives the same text, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gt_autoparallel.argument_checks import check_arguments
from gt_autoparallel.graph.graph_encoding import spec_text
from gt_autoparallel.graph.layouts import num_local_elements, short_text
from gt_autoparallel.plan.layer_ranges import ranged_rows
from gt_autoparallel.plan.numbers_as_text import size_text, us_text
from gt_autoparallel.plan.placement_plan import PlacementPlan, SolverReport, plan_problem
from gt_autoparallel.plan.plan_picture import times_in_full, windows_of_layers
from gt_autoparallel.plan.prediction import collective_totals, predicted_collectives

_OPTIMUM_GAP = 1e-9
"""Relative: what floating-point sums leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """One table; cells are text already."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    num_text_columns: int = 1
    """The first so many columns are text; the others are numbers, set to the right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that a report shows; as a string, the report for a terminal."""

    title: str
    summary: tuple[tuple[str, str], ...]
    """Names and values of what matters most."""

    tables: tuple[ReportTable, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.summary)
        lines = [self.title, *(f"  {name:<{width}}  {value}" for name, value in self.summary)]
        return "\n\n".join(["\n".join(lines), *map(_table_text, self.tables)]) + "\n"


def plan_report(plan: PlacementPlan) -> PlanReport:
    """The report of a plan, as data.

    Raises:
        PlacementInputError: what is given is no plan.
    """
    check_arguments("plan_report", plan_problem(plan))
    tables = (
        _parameters(plan),
        _inputs_and_outputs(plan),
        _collectives(plan),
        _time(plan),
        _memory(plan),
        *_replicated(plan),
    )
    title = f"Placement on {plan.mesh} ({plan.mesh.num_ranks} ranks)"
    return PlanReport(title=title, summary=tuple(_summary(plan)), tables=tables)


def _summary(plan: PlacementPlan) -> Iterator[tuple[str, str]]:
    solver, total = plan.solver, plan.memory.total
    yield "cost of a step", f"{us_text(plan.objective_us)} (simulated)"
    bound = f"{us_text(solver.lower_bound_us)}: {_certificate(solver)} ({solver.method})"
    yield "no plan costs less", bound
    budget = plan.request.memory_budget_bytes
    limit = "no budget" if budget is None else f"of a budget of {size_text(budget)}"
    yield "memory of a rank", f"{size_text(total)}, {limit}"
    if solver.memory_price_us_per_gib > 0:
        yield "one GiB more", f"would save {us_text(solver.memory_price_us_per_gib)} at the margin"
    if plan.judgement is not None:
        for line in plan.judgement.lines():
            yield "simulated step", line
    yield (
        "problem",
        f"{solver.num_nodes} nodes, {solver.num_variables} choices, {solver.num_options} options",
    )


def _certificate(solver: SolverReport) -> str:
    if solver.gap <= _OPTIMUM_GAP:
        return "a proven optimum"
    if solver.lower_bound_us <= 0:
        return "how far the plan is above the optimum is not known"
    return f"at most {solver.objective_us / solver.lower_bound_us - 1:.2%} above the optimum"


def _parameters(plan: PlacementPlan) -> ReportTable:
    rows = []
    for node in plan.graph.of_kind("parameter"):
        spec, layout = node.output(), plan.options[node.index].output()
        num_bytes = num_local_elements(spec.shape, layout, plan.mesh) * spec.dtype.itemsize
        placements = tuple(short_text((placement,)) for placement in layout)
        rows.append((str(node.target), (spec_text(spec), placements, num_bytes)))
    cells = tuple(
        (row.name, row.content[0], *row.content[1], size_text(row.content[2] * row.count))
        for row in ranged_rows(rows)
    )
    aliases = sorted(plan.graph.parameter_aliases)
    return ReportTable(
        title="Parameters",
        header=("parameter", "shape", *plan.mesh.names, "on each rank"),
        rows=cells,
        note=f"Tied to others: {', '.join(aliases)}" if aliases else "",
        num_text_columns=2 + plan.mesh.num_axes,
    )


def _inputs_and_outputs(plan: PlacementPlan) -> ReportTable:
    rows = []
    for node in plan.graph.nodes:
        option = plan.options[node.index]
        if node.kind == "output":
            spec, layout = plan.graph.spec(node.operands[0]), option.operands[0]
        elif node.kind in ("input", "buffer") and node.outputs[0] and option.outputs[0]:
            spec, layout = node.outputs[0], option.outputs[0]
        else:
            continue
        placements = tuple(short_text((placement,)) for placement in layout)
        rows.append((str(node.target), (node.kind, spec_text(spec), *placements)))
    return ReportTable(
        title="Inputs and outputs",
        header=("kind", "name", "shape", *plan.mesh.names),
        rows=tuple((row.content[0], row.name, *row.content[1:]) for row in ranged_rows(rows)),
        num_text_columns=3 + plan.mesh.num_axes,
    )


def _collectives(plan: PlacementPlan) -> ReportTable:
    totals = collective_totals(predicted_collectives(plan))
    rows = [
        (each.purpose, each.kind, each.axis, f"{each.count}", size_text(each.num_bytes))
        for each in totals
    ]
    return ReportTable(
        title="Collectives of a step",
        header=("purpose", "collective", "axis", "count", "on each rank"),
        rows=tuple(rows),
        note="" if rows else "None.",
        num_text_columns=3,
    )


def _time(plan: PlacementPlan) -> ReportTable:
    cells = [
        (name, compute_us, communication_us, max(0.0, communication_us - compute_us))
        for name, _, compute_us, communication_us in windows_of_layers(plan)
    ]
    cells += [(name, 0.0, time_us, time_us) for name, time_us in times_in_full(plan).items()]
    cells.append(
        ("all", sum(c[1] for c in cells), sum(c[2] for c in cells), sum(c[3] for c in cells))
    )
    return ReportTable(
        title="Time (simulated)",
        header=("window", "compute", "communication", "of it exposed"),
        rows=tuple((name, *map(us_text, times)) for name, *times in cells),
        note="Parameters and gradients move while their window computes; activations and copies do "
        "not.",
    )


def _memory(plan: PlacementPlan) -> ReportTable:
    rows = [*plan.memory.parts.items(), ("all", plan.memory.total)]
    return ReportTable(
        title="Memory of each rank",
        header=("what", "on each rank"),
        rows=tuple((what, size_text(num_bytes)) for what, num_bytes in rows),
        note=_moments(plan),
    )


def _moments(plan: PlacementPlan) -> str:
    """Which moment the table is of, where there are several."""
    memory = plan.memory
    moments = {"in the backward": memory.in_backward}
    if memory.loss:
        moments["at the loss"] = memory.at_loss
    if memory.in_flight:
        moments["where a layer's gradients are reduced"] = memory.at_reduction
    if len(moments) < 2:
        return ""
    sizes = {moment: sum(parts.values()) for moment, parts in moments.items()}
    fullest = max(sizes, key=lambda moment: sizes[moment])
    others = (f"{moment} it is {size_text(sizes[moment])}" for moment in sizes if moment != fullest)
    return f"Most is there {fullest}; {', '.join(others)}."


def _replicated(plan: PlacementPlan) -> Iterator[ReportTable]:
    if not plan.replicated_nodes:
        return
    nodes = {node.name: node for node in plan.graph.nodes}
    rows = ranged_rows((name, str(nodes[name].target)) for name in plan.replicated_nodes)
    yield ReportTable(
        title="Replicated because no rule knows them, as the request allowed",
        header=("node", "operator"),
        rows=tuple((row.name, row.content) for row in rows),
        num_text_columns=2,
    )


def _table_text(table: ReportTable) -> str:
    lines = [table.title]
    if table.rows:
        lines += _aligned([table.header, *table.rows], table.num_text_columns)
    if table.note:
        lines.append(f"  {table.note}")
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]], num_text_columns: int) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column < num_text_columns else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
