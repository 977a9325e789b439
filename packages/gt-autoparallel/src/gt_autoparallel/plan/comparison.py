"""What two plans of one model do differently: placements, collectives, time, memory.

The plans may have different meshes, prices or requests; parameters and nodes are matched by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from gt_autoparallel.argument_checks import check_arguments
from gt_autoparallel.graph.experts import expert_weight_layout
from gt_autoparallel.graph.layouts import Layout, short_text
from gt_autoparallel.plan.layer_ranges import ranged_rows
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.plan.prediction import (
    CollectiveTotal,
    collective_totals,
    predicted_collectives,
)
from gt_autoparallel.prices.memory import MemoryBreakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedLayout:
    """A tensor that the plans place differently, or that only one of them has."""

    name: str
    first: str
    """``"S(0) R"``; ``"-"`` where the plan does not have it."""

    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCollectives:
    """Collectives alike in kind, axis and purpose, of which the plans have other numbers."""

    what: str
    """``"unshard: all_gather along dp"``."""

    first_count: int
    second_count: int
    first_bytes: int
    second_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Differences from a first plan to a second one."""

    first_us: float
    second_us: float
    first_memory: MemoryBreakdown
    second_memory: MemoryBreakdown
    parameters: tuple[ChangedLayout, ...]
    """Parameters that are placed differently, in the order of the graph."""

    nodes: tuple[ChangedLayout, ...]
    """Outputs of operators, inputs and share nodes."""

    collectives: tuple[ChangedCollectives, ...]

    @property
    def is_same_placement(self) -> bool:
        """Whether every tensor lies the same in both."""
        return not self.parameters and not self.nodes

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def compare(first: PlacementPlan, second: PlacementPlan) -> PlanComparison:
    """What ``second`` does differently from ``first``.

    Raises:
        PlacementInputError: what is given is no plan.
    """
    check_arguments("compare", plan_problem(first, "first"), plan_problem(second, "second"))
    return PlanComparison(
        first_us=first.objective_us,
        second_us=second.objective_us,
        first_memory=first.memory,
        second_memory=second.memory,
        parameters=_changed(first.parameter_layouts(), second.parameter_layouts()),
        nodes=_changed(_node_layouts(first), _node_layouts(second)),
        collectives=tuple(_changed_collectives(first, second)),
    )


def _node_layouts(plan: PlacementPlan) -> dict[str, Layout]:
    """The layout of each output of each node but parameters, and of weights in routed experts."""
    layouts = {}
    for node, option in zip(plan.graph.nodes, plan.options, strict=True):
        if node.kind == "parameter":
            continue
        for number, layout in enumerate(option.outputs):
            if layout is not None:
                name = node.name if len(option.outputs) == 1 else f"{node.name} output {number}"
                layouts[name] = layout
        if node.kind == "experts":
            layouts[f"{node.name} weights"] = expert_weight_layout(node, option)
    return layouts


def _changed(first: dict[str, Layout], second: dict[str, Layout]) -> tuple[ChangedLayout, ...]:
    names = {**first, **second}
    return tuple(
        ChangedLayout(name=name, first=_text(first.get(name)), second=_text(second.get(name)))
        for name in names
        if first.get(name) != second.get(name)
    )


def _text(layout: Layout | None) -> str:
    return "-" if layout is None else short_text(layout)


def _changed_collectives(
    first: PlacementPlan, second: PlacementPlan
) -> Iterator[ChangedCollectives]:
    totals = [_totals(plan) for plan in (first, second)]
    for what in sorted({**totals[0], **totals[1]}):
        ours, theirs = (each.get(what) for each in totals)
        counts = [0 if total is None else total.count for total in (ours, theirs)]
        sizes = [0 if total is None else total.num_bytes for total in (ours, theirs)]
        if counts[0] != counts[1] or sizes[0] != sizes[1]:
            yield ChangedCollectives(
                what=what,
                first_count=counts[0],
                second_count=counts[1],
                first_bytes=sizes[0],
                second_bytes=sizes[1],
            )


def _totals(plan: PlacementPlan) -> dict[str, CollectiveTotal]:
    return {
        f"{total.purpose}: {total.kind} along {total.axis}": total
        for total in collective_totals(predicted_collectives(plan))
    }


def _lines(comparison: PlanComparison) -> Iterator[str]:
    first, second = comparison.first_us, comparison.second_us
    change = f" ({(second - first) / first:+.2%})" if first else ""
    yield f"cost of a step: {first:,.1f} us -> {second:,.1f} us{change}, simulated"
    for field in fields(MemoryBreakdown):
        ours = getattr(comparison.first_memory, field.name)
        theirs = getattr(comparison.second_memory, field.name)
        if ours != theirs:
            yield f"{_what(field.name)}: {ours:,} -> {theirs:,} bytes ({theirs - ours:+,})"
    for each in comparison.collectives:
        yield (
            f"{each.what}: {each.first_count} -> {each.second_count} launches, "
            f"{each.first_bytes:,} -> {each.second_bytes:,} bytes"
        )
    yield from _layout_lines("parameter", comparison.parameters)
    yield from _layout_lines("node", comparison.nodes)
    if comparison.is_same_placement:
        yield "every tensor is placed the same"


_WHEN = {"in_backward": "in the backward", "at_reduction": "at a reduction"}
"""From how names of fields end to words."""


def _what(field: str) -> str:
    """Of ``MemoryBreakdown``, in words; more of what is not there is less memory."""
    if field.startswith("let_go_"):
        return f"saved activations of a rank that are gone {_WHEN[field.removeprefix('let_go_')]}"
    if field.startswith("to_come_"):
        return f"gradients of a rank that are to come {_WHEN[field.removeprefix('to_come_')]}"
    return f"{field.replace('_', ' ')} of a rank"


def _layout_lines(what: str, changes: tuple[ChangedLayout, ...]) -> Iterator[str]:
    for row in ranged_rows((each.name, (each.first, each.second)) for each in changes):
        yield f"{what} {row.name}: {row.content[0]} -> {row.content[1]}"
