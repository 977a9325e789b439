"""From a problem to a proven choice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from gt_autoparallel.errors import DearPlacementError, OutOfTimeError, SolverError
from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import SearchPart, SearchSettings, with_settled_windows
from gt_autoparallel.solver.deadline import Deadline
from gt_autoparallel.solver.dominance import drop_dominated
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.incumbent import PRECISION, less_by
from gt_autoparallel.solver.infeasibility import explain_infeasibility
from gt_autoparallel.solver.problem import Problem
from gt_autoparallel.solver.reduced_problem import ReducedProblem, reduce_problem
from gt_autoparallel.solver.rivals import Rival, beat_rivals
from gt_autoparallel.solver.search import Search
from gt_autoparallel.solver.solution import ProgressCallback, Solution, WarmStart
from gt_autoparallel.solver.validation import check_problem

PROOF_GAP = 1e-9
"""A relative gap up to which two costs are equal: a search for the optimum ends there."""

_LAST = 0.1
"""Share of the time that is kept for rivals and ties."""


def solve(
    problem: Problem,
    *,
    relative_gap: float = 0.0,
    time_limit_seconds: float = 120.0,
    progress: ProgressCallback | None = None,
    warm_start: WarmStart | None = None,
    rivals: Sequence[Rival] = (),
    below_us: float = math.inf,
    most_parts: float = math.inf,
) -> Solution:
    """Finds the choice of least cost that keeps every budget.

    The same problem gives the same choice on every rank unless time ends the search, or what
    follows it: no other decision depends on time. Among choices of equal cost it prefers one with
    fewer bytes (``ties``), also in rows without a limit.

    Args:
        problem: see ``Problem``.
        relative_gap: the search may end when (objective - bound) / |objective| is at most this.
            Below 1e-9 counts as 1e-9, what float64 can tell.
        time_limit_seconds: after this the best choice yet is returned with its gap.
        progress: called after each stage and from time to time within long ones.
        warm_start: from the solution of a similar problem.
        rivals: parts of the problem; whatever the gap, the result costs no more than the best
            choice of each, unless that takes longer than the search itself and than a tenth of the
            time limit.
        below_us: choices that cost this or more are not looked for. One that is found may cost more
            all the same, if the gap ends the search before it is known whether all do.
        most_parts: of the problem, after which the best choice yet is returned with its gap; 1:
            nothing is branched.

    Raises:
        PlacementInputError: the problem's arrays do not fit each other.
        ForbiddenPairsError: no combination avoids the forbidden options and pairs.
        MemoryBudgetError: combinations exist, but each exceeds a budget.
        OutOfTimeError: the time limit passed before any choice was found.
        SolverError: as many parts as were asked for were looked at before that.
        DearPlacementError: every choice costs ``below_us`` or more.
    """
    check_problem(problem, rivals)
    start = time.perf_counter()
    deadline = start + time_limit_seconds
    reduced = reduce_problem(problem)
    if make_arc_consistent(reduced) is not None:
        raise explain_infeasibility(problem, solve)
    reduced.compact_links()
    whole = reduced.copy()
    drop_dominated(reduced)
    reduced.compact_links()
    reduced.settle_windows()
    search = Search(
        problem=problem,
        reduced=reduced,
        gap=relative_gap,
        deadline=Deadline(start + (1.0 - _LAST) * time_limit_seconds),  # which may be endless
        progress=progress,
        settings=SearchSettings(),
        start=start,
        below_us=less_by(below_us, PRECISION),
        most_parts=most_parts,
    )
    search.seconds["reduce"] = time.perf_counter() - start
    if warm_start is not None:
        search.begin_at(warm_start)
    search.run()
    if below_us < math.inf and search.has_nothing_below:
        raise DearPlacementError(search.lower_bound_us, below_us)
    if search.infeasible:
        raise explain_infeasibility(problem, solve)
    ended = time.perf_counter()
    if search.relative_gap > PROOF_GAP:
        most = max(ended - start, _LAST * time_limit_seconds)
        with search.timed("rivals"):
            beat_rivals(
                search.incumbent,
                whole,
                rivals,
                prices=search.prices,
                settings=search.settings,
                deadline=min(deadline, ended + most),
            )
    if search.incumbent.objective_us == math.inf:
        if search.num_parts >= most_parts:
            raise SolverError(f"no choice was found up to part {search.num_parts} of the problem")
        raise OutOfTimeError(time_limit_seconds)
    with search.timed("ties"):
        left = deadline - time.perf_counter()
        prefer_fewer_bytes(search, whole, seconds=min(left, _LAST * time_limit_seconds))
    return _solution(search, start)


def _solution(search: Search, start: float) -> Solution:
    found = evaluate(search.problem, search.incumbent.choices)
    # The search may end exactly at the gap asked for; rounding must not call that too much.
    proven = search.relative_gap <= max(search.gap, PROOF_GAP) * (1.0 + 1e-9)
    ended = "by the time limit" if search.deadline.is_over() else f"after part {search.num_parts}"
    return Solution(
        choices=search.incumbent.choices,
        objective_us=found.objective_us,
        lower_bound_us=search.lower_bound_us,
        gap=search.relative_gap,
        proven=proven,
        method=search.method if proven else f"{search.method}, ended {ended}",
        seconds={**search.seconds, "total": time.perf_counter() - start},
        memory_bytes=found.memory_bytes,
        memory_prices=tuple(search.prices.memory.tolist()),
        warm_start=search.warm_start(),
    )


# Takes a choice with fewer bytes among those that cost the same.
#
# Where the bytes of a plan do not matter for its cost, a search ends at any of many choices of
# equal cost. So afterwards bytes get a price, so small that all of them together would cost a
# millionth of the objective, and HiGHS solves the MILP over the options that cost nothing more
# than the best ones: those whose min-marginals are equal to the least of their node. What it
# finds is taken only if the cost, without that price, is no more than before.
_EQUAL = 1e-9
"""Difference of min-marginals, relative to the objective, that counts as none."""

_PRICES_OF_ALL_BYTES = (1e-6, 1e-9)
"""Relative to the objective; tried in turn until the cost stays what it was."""


def prefer_fewer_bytes(search: Search, whole: ReducedProblem, *, seconds: float) -> None:
    """Offers a search that has ended a choice that costs the same and takes fewer bytes.

    ``whole`` is the problem before the search dropped anything from it.
    """
    best = search.incumbent.choices
    if not search.problem.memory or not best or seconds <= 0.0:
        return
    tied = _tied_options(search, whole, best)
    if tied is None:
        return
    most = math.fsum(float(node.memory.sum(axis=0).max()) for node in tied.nodes)
    least = math.fsum(float(node.memory.sum(axis=0).min()) for node in tied.nodes)
    if tied.num_pairs > search.settings.most_tied_pairs or most <= least:
        return
    scale = max(abs(search.incumbent.objective_us), 1e-9) / (most - least)
    costs = [node.cost for node in tied.nodes]
    for price in _PRICES_OF_ALL_BYTES:
        for node, cost in zip(tied.nodes, costs, strict=True):
            node.cost = cost + price * scale * node.memory.sum(axis=0)
        result = HighsModel(tied).solve(
            integer=True, seconds=seconds, max_nodes=search.settings.restricted_nodes
        )
        for positions in result.positions:
            search.incumbent.offer(tied.choices(positions))
        if search.incumbent.choices != best:
            return


def _tied_options(
    search: Search, whole: ReducedProblem, best: tuple[int, ...]
) -> ReducedProblem | None:
    """The best choice's options and those whose min-marginals are the least of their node."""
    part = SearchPart(whole.copy(), with_settled_windows(whole, search.prices))
    room = _EQUAL * abs(search.incumbent.objective_us)
    masks = [
        (bounds <= bounds.min() + room) | (node.options == choice)
        for bounds, node, choice in zip(part.option_bounds(), part.reduced.nodes, best, strict=True)
    ]
    return part.restricted(masks)
