"""The planner's plan beside those of experts, by simulated steps: the fastest is taken.

What experts do (FSDP, with tensor or expert parallelism) is a part of the planner's own problem,
so that by its prices nothing of it is cheaper. Its prices may be wrong. Here the cheapest plan that
does what each expert does is found under the same demands and budget, and whoever asks brings a
judge that simulates steps. Decision: docs/decisions/0044-rivals-by-simulated-steps.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import InfeasiblePlacementError, SolverError, UnrunnablePlanError
from gt_autoparallel.expert_table import ExpertPlan, expert_plans
from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.parameter_chains import ParameterMove, parameter_chains
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.plan.judgement import Candidate, JudgedStep, PlanJudgement, fastest
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.plan_assembly import assemble_plan
from gt_autoparallel.planner import Planner
from gt_autoparallel.prices.costs import PlacementPrices, StepTime
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.axis_styles import AxisStyle, expert_styles
from gt_passes.simulation import CostModel

OWN = "planner"
"""Name of the plan that was found without an expert's pins."""

QUEUED = "planner, with queues"
"""Name of the plan that was found by ``QueuedPrices``."""

_WORTH_SIMULATING = 1.3
"""In units of the own plan's cost. Of the steps that were compared by both, prices and simulation
differ by less."""


class Judge(Protocol):
    """Simulates the step of a plan: places a model by it, captures it, and prices the capture."""

    def __call__(self, plan: PlacementPlan, /) -> JudgedStep:
        """Time and memory of the step.

        Raises:
            UnrunnablePlanError: this plan is not to be taken. Whatever else is raised ends the
                search.
        """
        ...


def with_rivals(
    planner: Planner,
    plan: PlacementPlan,
    judge: Judge,
    *,
    relative_gap: float,
    time_limit_seconds: float,
) -> PlacementPlan:
    """The fastest by ``judge`` of a plan and of what experts would do; it says who was compared.

    Rivals keep what was asked of ``plan``: constraints, budget, recomputation. Who replicates
    parameters is no rival, and neither is who costs 1.3 times as much or more by the planner's
    prices, unless no step can be made of ``plan``.

    Args:
        planner: that found ``plan``.
        plan: found without the pins of an expert.
        judge: called once for each plan that differs from those before it.
        relative_gap: how much each rival may cost above the cheapest that does the same.
        time_limit_seconds: for each rival's search.

    Raises:
        UnrunnablePlanError: no step can be made of any of them; it says of each why.
        Exception: whatever else ``judge`` raises.
    """
    plans = {OWN: plan}
    candidates = [_judged(judge, OWN, plan)]
    below_us = math.inf if candidates[0].step is None else _worth_simulating_us(plan)
    for rival in _rivals(planner, plan, relative_gap, time_limit_seconds, below_us):
        found, same = rival.plan, None
        if found is not None:
            same = next((name for name, known in plans.items() if _is_same(known, found)), None)
        reason = _reason_against(rival, plan, same, below_us)
        if found is None or reason:
            cost = None if found is None else found.objective_us
            candidate = Candidate(name=rival.name, objective_us=cost, step=None, reason=reason)
        else:
            plans[rival.name] = found
            candidate = _judged(judge, rival.name, found)
        candidates.append(candidate)
    if all(each.step is None for each in candidates):
        reasons = "; ".join(map(str, candidates))
        raise UnrunnablePlanError(f"no step can be made of any plan: {reasons}")
    chosen = fastest(candidates).name
    judgement = PlanJudgement(chosen=chosen, candidates=tuple(candidates))
    return replace(plans[chosen], judgement=judgement)


def _judged(judge: Judge, name: str, plan: PlacementPlan) -> Candidate:
    step: JudgedStep | None = None
    reason = ""
    try:
        step = judge(plan)
    except UnrunnablePlanError as error:
        reason = f"not simulated: {error}"
    return Candidate(name=name, objective_us=plan.objective_us, step=step, reason=reason)


def _rivals(
    planner: Planner,
    plan: PlacementPlan,
    relative_gap: float,
    time_limit_seconds: float,
    below_us: float,
) -> Iterator[ExpertPlan]:
    queued = _queued(planner, plan, relative_gap, time_limit_seconds)
    if queued is not None:
        yield queued
    yield from _experts(planner, plan, relative_gap, time_limit_seconds, below_us)


def _queued(
    planner: Planner, plan: PlacementPlan, relative_gap: float, time_limit_seconds: float
) -> ExpertPlan | None:
    """The cheapest plan if activations wait for parameters along all axes but the innermost."""
    mesh, prices, request = planner.mesh, planner.prices, plan.request
    if mesh.num_axes == 1 or not isinstance(prices, PlacementPrices):
        return None
    inner = min(range(mesh.num_axes), key=lambda axis: mesh.strides[axis])
    searching = Planner(
        planner.graph,
        mesh,
        signature=planner.signature,
        prices=QueuedPrices(
            prices.cost_model,
            microbatches=request.microbatches,
            layer_bytes=largest_layer_bytes(planner.graph),
            axes={*range(mesh.num_axes)} - {inner},
        ),
        replicate_unknown=planner.replicate_unknown,
        optimizer_state_copies=request.optimizer_state_copies,
        microbatches=request.microbatches,
        loss_bytes=request.loss_bytes,
        accumulates_gradients=request.accumulates_gradients,
    )
    try:
        found = searching.find(
            constraints=request.constraints,
            memory_budget_bytes=request.memory_budget_bytes,
            recomputes=request.recomputes,
            relative_gap=relative_gap,
            time_limit_seconds=time_limit_seconds,
            audit=False,  # of the plan at its own prices, below
        )
    except (SolverError, InfeasiblePlacementError) as error:
        return ExpertPlan(name=QUEUED, plan=None, impossible=str(error))
    at_own_prices = assemble_plan(
        graph=planner.graph,
        mesh=mesh,
        options=found.options,
        recomputed=found.recomputed,
        prices=prices,
        request=request,
        signature=planner.signature,
        solver=found.solver,
    )
    solver = replace(
        found.solver,
        objective_us=at_own_prices.objective_us,
        lower_bound_us=plan.solver.lower_bound_us,
        proven=False,
    )
    at_own_prices = replace(at_own_prices, solver=solver)
    audit_plan(at_own_prices)
    return ExpertPlan(name=QUEUED, plan=at_own_prices)


def _experts(
    planner: Planner,
    plan: PlacementPlan,
    relative_gap: float,
    time_limit_seconds: float,
    below_us: float,
) -> Iterator[ExpertPlan]:
    return expert_plans(
        planner,
        styles=_styles(planner),
        constraints=plan.request.constraints,
        memory_budget_bytes=plan.request.memory_budget_bytes,
        recomputes=plan.request.recomputes,
        relative_gap=relative_gap,
        time_limit_seconds=time_limit_seconds,
        below_us=below_us,
    )


def _styles(planner: Planner) -> dict[str, Mapping[str, AxisStyle]]:
    has_experts = bool(planner.graph.of_kind("experts"))
    styles = expert_styles(planner.mesh, routed_experts=has_experts)
    return {name: axes for name, axes in styles.items() if not name.startswith("DDP")}


def _is_same(first: PlacementPlan, second: PlacementPlan) -> bool:
    return first.options == second.options and first.recomputed == second.recomputed


def _reason_against(
    expert: ExpertPlan, own: PlacementPlan, same: str | None, below_us: float
) -> str:
    if expert.least_us is not None:
        return f"not simulated: {_times(expert.least_us, own)} or more"
    if expert.plan is None:
        return f"no plan: {expert.impossible.partition(';')[0]}"
    if same is not None:
        return f"not simulated: the same as {same}"
    if expert.plan.objective_us >= below_us:
        return f"not simulated: {_times(expert.plan.objective_us, own)}"
    return ""


def _worth_simulating_us(own: PlacementPlan) -> float:
    """A rival must cost less; it may cost anything if the own plan costs nothing."""
    return _WORTH_SIMULATING * own.objective_us or math.inf


def _times(cost_us: float, own: PlacementPlan) -> str:
    return f"{cost_us / own.objective_us:.2f} times the cost by the planner's prices"


# Prices by which activations wait for parameters that move along the same axis.
#
# The collectives of one process group run one after another. While the parameters of the next
# layer are gathered along an axis, and gradients of the last reduced, an exchange of activations
# along it waits for what is under way, however small it is; and computation waits for the
# exchange. By ``PlacementPrices`` it does not, since how much moves where is what is being
# decided. Here it is assumed: along some axes whatever is launched for activations first waits
# for the gathering of a layer.
class QueuedPrices(PlacementPrices):
    """``PlacementPrices`` with the wait for one layer's parameters.

    They are for searches alone: a plan has the prices that it is stored with.

    Args:
        cost_model: of the machine.
        microbatches: of a step; as for ``PlacementPrices``.
        layer_bytes: of the parameters of a layer, as they are gathered.
        axes: indices of those along which activations wait.
    """

    def __init__(
        self,
        cost_model: CostModel,
        *,
        microbatches: Microbatches | None,
        layer_bytes: int,
        axes: Collection[int],
    ) -> None:
        super().__init__(cost_model, microbatches=microbatches)
        self._layer_bytes = layer_bytes
        self._axes = frozenset(axes)

    def step_time(
        self,
        step: RedistributionStep,
        dtype: torch.dtype,
        mesh: MeshShape,
        move: ParameterMove | None,
    ) -> StepTime:
        """Time of one step of a redistribution, as in ``StepPrices``."""
        time = super().step_time(step, dtype, mesh, move)
        if move is not None or step.kind == "slice" or step.axis not in self._axes:
            return time
        ranks = mesh.ranks_of_axis(step.axis)
        # The other axes have cut the layer too.
        gathered = self._layer_bytes * len(ranks) // math.prod(mesh.sizes)
        wait_us = self.cost_model.collective_us("all_gather", gathered, ranks)
        return StepTime(time.in_full_us + wait_us, time.hidden_us)


def largest_layer_bytes(graph: PlacementGraph) -> int:
    """Bytes of the parameters of the layer that has most, in the dtype in which they are used."""
    of_parameters: dict[str, int] = {}
    for index, name in parameter_chains(graph).items():
        num_bytes = graph.nodes[index].output().num_bytes
        of_parameters[name] = min(num_bytes, of_parameters.get(name, num_bytes))
    of_layers: Counter[str] = Counter()
    for name, num_bytes in of_parameters.items():
        layer = layer_of_module(name)
        if layer is not None:
            of_layers[layer] += num_bytes
    return max(of_layers.values(), default=0)
