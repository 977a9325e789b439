"""What experts' plans would cost on a mesh, next to the planner's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.errors import (
    ConstraintError,
    DearPlacementError,
    InfeasiblePlacementError,
    SolverError,
)
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.axis_styles import AxisStyle, expert_styles, pinned_constraints
from gt_autoparallel.problem.constraints import LayoutConstraint
from gt_autoparallel.problem.tensor_parallel_names import TensorParallelNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """One expert's plan, or why there is none, or why none was found."""

    name: str
    plan: PlacementPlan | None
    impossible: str = ""

    least_us: float | None = None
    """What every such plan costs at least, if there is none for being too dear."""


def expert_plans(
    planner: Planner,
    *,
    styles: Mapping[str, Mapping[str, AxisStyle]] | None = None,
    names: TensorParallelNames | None = None,
    constraints: Sequence[LayoutConstraint] = (),
    memory_budget_bytes: int | None = None,
    recomputes: bool = True,
    relative_gap: float = 1e-3,
    time_limit_seconds: float = 120.0,
    below_us: float = math.inf,
) -> Iterator[ExpertPlan]:
    """The cheapest plan that does what each expert does.

    Args:
        planner: of the model and mesh.
        styles: names, and what is done along each axis; by default ``expert_styles``, with
            expert parallelism if the model has routed experts.
        names: which parameters tensor parallelism cuts.
        constraints: what each must keep besides. Where these say how an input lies, an expert does
            not.
        memory_budget_bytes: on each rank; None for no limit.
        recomputes: whether the backward may run parts of the forward again, as for
            ``Planner.find``.
        relative_gap: how much each may cost above the cheapest that does the same.
        time_limit_seconds: for each; who has none by then has no plan.
        below_us: likewise who is known to cost this or more, as for ``Planner.find``.
    """
    if styles is None:
        has_experts = bool(planner.graph.of_kind("experts"))
        styles = expert_styles(planner.mesh, routed_experts=has_experts)
    for name, by_axis in styles.items():
        pins = pinned_constraints(
            planner.graph,
            planner.mesh,
            by_axis,
            names=names,
            replicate_unknown=planner.replicate_unknown,
        )
        try:
            plan = planner.find(
                constraints=(*constraints, *_without_given(pins, constraints, planner)),
                memory_budget_bytes=memory_budget_bytes,
                recomputes=recomputes,
                relative_gap=relative_gap,
                time_limit_seconds=time_limit_seconds,
                below_us=below_us,
            )
        except DearPlacementError as error:
            yield ExpertPlan(name=name, plan=None, impossible=str(error), least_us=error.least_us)
        except (ConstraintError, InfeasiblePlacementError, SolverError) as error:
            yield ExpertPlan(name=name, plan=None, impossible=" ".join(str(error).split()))
        else:
            yield ExpertPlan(name=name, plan=plan)


def _without_given(
    pins: Sequence[LayoutConstraint], given: Sequence[LayoutConstraint], planner: Planner
) -> Iterator[LayoutConstraint]:
    """An expert's pins but those of inputs that are given otherwise: data come as they come."""
    inputs = {node.name for node in planner.graph.of_kind("input")}
    fixed = inputs.intersection(each.node for each in given)
    return (pin for pin in pins if pin.node not in fixed)


def expert_table(plan: PlacementPlan, experts: Sequence[ExpertPlan]) -> str:
    """The planner's plan and the experts', the cheapest first, as text."""
    rows = [("planner", plan.objective_us, plan.memory.total)]
    rows += [
        (each.name, each.plan.objective_us, each.plan.memory.total)
        for each in experts
        if each.plan is not None
    ]
    rows.sort(key=lambda row: row[1])
    width = max(len(name) for name, _, _ in rows)
    lines = [f"simulated, on {plan.mesh}"]
    lines += [
        f"{name:<{width}}  {time_us:>14,.1f} us  {time_us / plan.objective_us:>7.3f}x  "
        f"{num_bytes / 2**20:>12,.1f} MiB"
        for name, time_us, num_bytes in rows
    ]
    lines += [f"{each.name}: {each.impossible}" for each in experts if each.plan is None]
    return "\n".join(lines)
