"""What a search for a placement found, and what the planner reports of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.plan.placement_plan import SolverReport
from gt_autoparallel.plan.plan_assembly import planned_times
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.problem.constraints import ResolvedRequest
from gt_autoparallel.problem.problem_of_graph import PlacementProblem
from gt_autoparallel.problem.requested_memory import requested_memory
from gt_autoparallel.solver import Mixture
from gt_autoparallel.solver.solution import relative_gap as gap_of
from gt_autoparallel.solver.solve import PROOF_GAP

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlacement:
    """A placement of all nodes."""

    options: tuple[NodeOption, ...]
    """Of each node."""

    recomputed: tuple[int, ...]
    """Nodes that run again in the backward, in order."""

    memory: MemoryBreakdown
    report: SolverReport


def cheaper_of(mixed: FoundPlacement, alike: FoundPlacement, relative_gap: float) -> FoundPlacement:
    """The cheaper one of two, of which layers that do the same are a mixture as well.

    Args:
        mixed: the best mixture that was found. Its bound is that of all mixtures.
        alike: the best of which alike layers do the same.
        relative_gap: that was asked for.
    """
    seconds = mixed.report.seconds + alike.report.seconds
    if alike.report.objective_us >= mixed.report.objective_us:
        return replace(mixed, report=replace(mixed.report, seconds=seconds))
    bound = min(mixed.report.lower_bound_us, alike.report.objective_us)
    report = replace(
        alike.report,
        lower_bound_us=bound,
        seconds=seconds,
        proven=is_proven(gap_of(alike.report.objective_us, bound), relative_gap),
    )
    return replace(alike, report=report)


def is_proven(gap: float, relative_gap: float) -> bool:
    """Whether a gap is as small as was asked for; it may end exactly there, and be rounded."""
    return gap <= max(relative_gap, PROOF_GAP) * (1 + 1e-9)


def found_placement(
    placement: PlacementProblem,
    solution: Sequence[int] | Mixture,
    request: ResolvedRequest,
    mesh: MeshShape,
    prices: StepPrices,
    *,
    objective_us: float,
    lower_bound_us: float,
    method: str,
    seconds: float,
    memory_prices: Sequence[float],
    proven: bool,
) -> FoundPlacement:
    """What a solution of a problem places, and what its search says of itself.

    A placement leaves out what runs again for nobody, which the search may have counted. If it so
    costs less than the bound of the search, it is its own bound.

    Args:
        placement: the problem.
        solution: a choice for each variable, or a mixture.
        request: what the problem is for.
        mesh: of the ranks.
        prices: of the problem.
        objective_us: of the solution.
        lower_bound_us: what no solution costs less than.
        method: what found it.
        seconds: that the search took.
        memory_prices: duals of the memory rows, us per byte.
        proven: whether the gap is as small as was asked for.
    """
    options, recomputed = placement.options_of_nodes(solution), placement.recomputed_nodes(solution)
    idle_us = _idle_work_us(placement, solution, options, recomputed, mesh, prices)
    objective_us -= idle_us
    if idle_us:
        lower_bound_us = min(lower_bound_us, objective_us)
    return FoundPlacement(
        options=options,
        recomputed=recomputed,
        memory=requested_memory(
            placement.graph, options, mesh, request, recomputed=frozenset(recomputed)
        ),
        report=SolverReport(
            objective_us=objective_us,
            # All costs are at least 0, also where time was over before there was any other bound.
            lower_bound_us=max(lower_bound_us, 0.0),
            method=method,
            seconds=seconds,
            num_variables=len(placement.problem.variables),
            num_options=sum(map(len, placement.choices)),
            num_nodes=len(placement.graph.nodes),
            memory_price_us_per_gib=abs(sum(memory_prices)) * _GIB,
            proven=proven,
        ),
    )


def _idle_work_us(
    placement: PlacementProblem,
    solution: Sequence[int] | Mixture,
    options: Sequence[NodeOption],
    recomputed: Sequence[int],
    mesh: MeshShape,
    prices: StepPrices,
) -> float:
    """What a solution costs more than its placement, in which nothing runs again for nobody.

    Nodes of alike layers that other layers read, or that read what other layers made, share one
    choice in any mixture. If some of these layers need such a node to run again, it is counted in
    all of them.
    """
    chosen = placement.chosen_again(solution)
    if chosen == recomputed:
        return 0.0

    def with_(again: Collection[int]) -> float:
        return planned_times(placement.graph, mesh, options, prices, recomputed=again).step_us

    return with_(chosen) - with_(recomputed)
