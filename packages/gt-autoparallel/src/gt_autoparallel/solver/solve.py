"""From a problem to a proven choice."""

from __future__ import annotations

import math
import time

from gt_autoparallel.errors import SolverError
from gt_autoparallel.problem import Problem
from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.highs_model import HighsModel, HighsResult
from gt_autoparallel.solver.infeasibility import explain_infeasibility
from gt_autoparallel.solver.reduced_problem import ReducedProblem, reduce_problem
from gt_autoparallel.solver.solution import (
    Progress,
    ProgressCallback,
    Solution,
    WarmStart,
    relative_gap,
)
from gt_autoparallel.solver.validation import check_problem

__all__ = ["solve"]

_PROOF_GAP = 1e-9


def solve(
    problem: Problem,
    *,
    relative_gap: float = 0.0,
    time_limit_seconds: float = 120.0,
    progress: ProgressCallback | None = None,
    warm_start: WarmStart | None = None,
) -> Solution:
    """Finds the choice of least cost that keeps every budget.

    The same problem gives the same choice on every rank unless the time limit ends the search.

    Args:
        problem: see ``Problem``.
        relative_gap: the search may end when (objective - bound) / |objective| is at most this.
            Below 1e-9 counts as 1e-9, what float64 can tell.
        time_limit_seconds: after this the best choice yet is returned with its gap.
        progress: called after each stage and from time to time within long ones.
        warm_start: from the solution of a similar problem.

    Raises:
        PlacementInputError: the problem's arrays do not fit each other.
        ForbiddenPairsError: no combination avoids the forbidden options and pairs.
        MemoryBudgetError: combinations exist, but each exceeds a budget.
        SolverError: the time limit passed before any choice was found.
    """
    check_problem(problem)
    start = time.perf_counter()
    reduced = reduce_problem(problem)
    empty = make_arc_consistent(reduced)
    if empty is not None:
        raise explain_infeasibility(problem, solve)
    reduced.compact_links()
    reduced.settle_windows()
    model = HighsModel(reduced)
    presolved = time.perf_counter()
    limit = time_limit_seconds - (presolved - start)
    relaxation = model.solve(integer=False, seconds=limit)
    solved = time.perf_counter()
    result, bound, method = relaxation, relaxation.lower_bound_us, "LP relaxation"
    if relaxation.feasible and not (relaxation.integral and _within_budgets(reduced, relaxation)):
        limit = time_limit_seconds - (time.perf_counter() - start)
        result = model.solve(integer=True, seconds=limit, gap=relative_gap)
        bound, method = max(bound, result.lower_bound_us), "MILP"
    if result.feasible is False:
        raise explain_infeasibility(problem, solve)
    if not result.positions:
        raise SolverError(f"no choice found within {time_limit_seconds} seconds")
    end = time.perf_counter()
    if progress is not None:
        choices = reduced.choices(result.positions[0])
        progress(
            Progress(
                stage=method,
                incumbent_us=evaluate(problem, choices).objective_us,
                lower_bound_us=bound,
                num_options=reduced.num_options,
                seconds=end - start,
            )
        )
    seconds = {"reduce": presolved - start, "lp": solved - presolved, "milp": end - solved}
    return _solution(
        problem, reduced, result, relaxation, bound, relative_gap, method, seconds, model
    )


def _within_budgets(reduced: ReducedProblem, result: HighsResult) -> bool:
    found = evaluate(reduced.problem, reduced.choices(result.positions[0]))
    return not any(found.excess_bytes(reduced.problem))


def _solution(
    problem: Problem,
    reduced: ReducedProblem,
    result: HighsResult,
    relaxation: HighsResult,
    bound: float,
    gap_limit: float,
    method: str,
    seconds: dict[str, float],
    model: HighsModel,
) -> Solution:
    choices = reduced.choices(result.positions[0])
    found = evaluate(problem, choices)
    bound = min(bound, found.objective_us) if math.isfinite(bound) else bound
    gap = relative_gap(found.objective_us, bound)
    return Solution(
        choices=choices,
        objective_us=found.objective_us,
        lower_bound_us=bound,
        gap=gap,
        proven=gap <= max(gap_limit, _PROOF_GAP),
        method=method,
        seconds={**seconds, "total": math.fsum(seconds.values())},
        memory_bytes=found.memory_bytes,
        memory_prices=tuple(relaxation.memory_prices.tolist()),
        window_prices=tuple(relaxation.window_prices.tolist()),
        num_variables=model.num_columns,
        num_rows=model.num_rows,
        warm_start=WarmStart(choices=choices),
    )
