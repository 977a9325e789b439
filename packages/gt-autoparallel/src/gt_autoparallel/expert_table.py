"""What experts' plans would cost on a mesh, next to the planner's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.errors import ConstraintError, InfeasiblePlacementError
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.axis_styles import AxisStyle, expert_styles, pinned_constraints
from gt_autoparallel.problem.tensor_parallel_names import TensorParallelNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """One expert's plan, or why there is none."""

    name: str
    plan: PlacementPlan | None
    impossible: str = ""


def expert_plans(
    planner: Planner,
    *,
    styles: Mapping[str, Mapping[str, AxisStyle]] | None = None,
    names: TensorParallelNames | None = None,
    memory_budget_bytes: int | None = None,
    relative_gap: float = 1e-3,
    time_limit_seconds: float = 120.0,
) -> Iterator[ExpertPlan]:
    """The cheapest plan that does what each expert does.

    Args:
        planner: of the model and mesh.
        styles: names, and what is done along each axis; by default ``expert_styles``, with
            expert parallelism if the model has routed experts.
        names: which parameters tensor parallelism cuts.
        memory_budget_bytes: on each rank; None for no limit.
        relative_gap: how much each may cost above the cheapest that does the same.
        time_limit_seconds: for each.
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
                constraints=pins,
                memory_budget_bytes=memory_budget_bytes,
                relative_gap=relative_gap,
                time_limit_seconds=time_limit_seconds,
            )
        except (ConstraintError, InfeasiblePlacementError) as error:
            yield ExpertPlan(name=name, plan=None, impossible=" ".join(str(error).split()))
        else:
            yield ExpertPlan(name=name, plan=plan)


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
