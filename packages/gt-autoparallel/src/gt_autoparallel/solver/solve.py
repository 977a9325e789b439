"""From a problem to a proven choice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from gt_autoparallel.errors import (
    DearPlacementError,
    InfeasiblePlacementError,
    OutOfTimeError,
    SolverError,
)
from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import SearchPart, SearchSettings, with_settled_windows
from gt_autoparallel.solver.deadline import Deadline
from gt_autoparallel.solver.dominance import drop_dominated
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.incumbent import PRECISION, less_by
from gt_autoparallel.solver.problem import Edge, FloatArray, Problem, Variable, Window
from gt_autoparallel.solver.reduced_problem import ReducedProblem, reduce_problem
from gt_autoparallel.solver.rivals import Rival, beat_rivals
from gt_autoparallel.solver.search import Search
from gt_autoparallel.solver.solution import (
    ForbiddenPairsError,
    MemoryBudgetError,
    MemoryShortage,
    ProgressCallback,
    Solution,
    WarmStart,
)
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


# Why there is no choice at all: which forbidden pairs, or which budget and by how much.
_FILTER_SECONDS = 10.0
"""After this a conflict is reported as small as it got."""


def explain_infeasibility(
    problem: Problem, minimize: Callable[[Problem], Solution]
) -> InfeasiblePlacementError:
    """The error that says why ``problem`` has no solution; ``minimize`` solves without budgets.

    Raises:
        SolverError: it has one.
    """
    reduced = reduce_problem(problem)
    empty = make_arc_consistent(reduced)
    if empty is not None:
        return _forbidden(problem, _traced_edges(reduced, empty))
    if not _has_combination(problem, range(len(problem.edges))):
        return _forbidden(problem, list(range(len(problem.edges))))
    return _over_budget(problem, minimize)


def _allowed(variable: Variable) -> FloatArray:
    """[K] 0 for options that are allowed, inf for others."""
    finite = np.isfinite(variable.cost_us)
    if variable.window is not None:
        finite &= np.isfinite(variable.window_compute_us)
    for values in (*variable.further_compute_us.values(), *variable.memory_bytes):
        finite &= np.isfinite(values)
    return np.where(finite, 0.0, np.inf)


def _plain_variable(name: str, cost: FloatArray) -> Variable:
    zeros = np.zeros(len(cost))
    return Variable(name=name, cost_us=cost, window=None, window_compute_us=zeros, memory_bytes=())


def _plain_edge(edge: Edge, left: int, right: int) -> Edge:
    """Only what ``edge`` forbids."""
    finite = np.isfinite(edge.cost_us)
    if edge.window is not None:
        finite &= np.isfinite(edge.window_communication_us)
    return Edge(
        name=edge.name,
        left=left,
        right=right,
        left_labels=edge.left_labels,
        right_labels=edge.right_labels,
        cost_us=np.where(finite, 0.0, np.inf),
        window=None,
        window_communication_us=np.zeros(edge.cost_us.shape),
    )


def _has_combination(problem: Problem, edges: Sequence[int]) -> bool:
    """Whether some choice avoids the pairs that the given edges forbid."""
    ends = sorted({v for e in edges for v in (problem.edges[e].left, problem.edges[e].right)})
    place = {variable: position for position, variable in enumerate(ends)}
    variables = [problem.variables[v] for v in ends]
    part = Problem(
        variables=tuple(_plain_variable(v.name, _allowed(v)) for v in variables),
        edges=tuple(
            _plain_edge(edge, place[edge.left], place[edge.right])
            for edge in (problem.edges[e] for e in edges)
        ),
        windows=(),
        memory=(),
    )
    reduced = reduce_problem(part)
    if make_arc_consistent(reduced) is not None:
        return False
    reduced.compact_links()
    if not any(True for _ in reduced.live_links()):
        return True
    result = HighsModel(reduced).solve(integer=True, seconds=_FILTER_SECONDS)
    return result.feasible is not False


def _traced_edges(reduced: ReducedProblem, empty: int) -> list[int]:
    """Edges that had a part in emptying a node: the log of removals, followed backwards."""
    concerned = {empty}
    edges: set[int] = set()
    for node, position in reversed(reduced.removal_log):
        link = reduced.links[position]
        if node in concerned and link is not None:
            concerned.update(link.ends)
            edges.update(link.edges)
    concerned_self = {
        index
        for index, edge in enumerate(reduced.problem.edges)
        if edge.left == edge.right and edge.left in concerned
    }
    return sorted(edges | concerned_self)


def _smallest_conflict(problem: Problem, edges: list[int]) -> tuple[list[int], bool]:
    """A subset of ``edges`` that still has no combination, and whether it is minimal.

    Deletion filter (Chinneck and Dravnieks 1991) that tries halves, quarters, ... before single
    edges: whatever may be left out without making a combination possible is left out.
    """
    end = time.perf_counter() + _FILTER_SECONDS
    size = max(len(edges) // 2, 1)
    while True:
        start = 0
        while start < len(edges):
            if time.perf_counter() > end:
                return edges, False
            rest = edges[:start] + edges[start + size :]
            if rest and not _has_combination(problem, rest):
                edges = rest
            else:
                start += size
        if size == 1:
            return edges, True
        size //= 2


def _forbidden(problem: Problem, edges: list[int]) -> ForbiddenPairsError:
    for index, variable in enumerate(problem.variables):
        if not np.isfinite(_allowed(variable)).any():
            return ForbiddenPairsError(
                f"every option of {variable.name!r} is forbidden",
                variables=(index,),
                edges=(),
                minimal=True,
            )
    edges, minimal = _smallest_conflict(problem, edges)
    variables = sorted({v for e in edges for v in (problem.edges[e].left, problem.edges[e].right)})
    ends = ", ".join(repr(problem.variables[v].name) for v in variables)
    names = ", ".join(repr(problem.edges[e].name) for e in edges)
    return ForbiddenPairsError(
        f"no combination of options of {ends} avoids what {names} forbid"
        + ("s" if len(edges) == 1 else ""),
        variables=tuple(variables),
        edges=tuple(edges),
        minimal=minimal,
    )


def _over_budget(problem: Problem, minimize: Callable[[Problem], Solution]) -> MemoryBudgetError:
    rows = range(len(problem.memory))
    alone = [
        _shortage(problem, row, minimize(_memory_problem(problem, [row])).choices) for row in rows
    ]
    shortages = [each for each in alone if each.excess_bytes > 0]
    jointly = not shortages
    if jointly:
        choices = minimize(_excess_problem(problem)).choices[: len(problem.variables)]
        together = (_shortage(problem, row, choices) for row in rows)
        shortages = [each for each in together if each.excess_bytes > 0]
    if not shortages:
        raise SolverError("the search found no choice that keeps all memory budgets, and one does")
    frugal = minimize(_memory_problem(problem, rows)).choices if len(rows) > 1 else alone[0].choices
    text = "; ".join(
        f"{s.row!r} {'takes' if jointly else 'needs at least'} {s.minimum_bytes:,.0f} bytes, "
        f"{s.excess_bytes:,.0f} over its budget of {s.budget_bytes:,.0f}"
        for s in shortages
    )
    if jointly:
        text = (
            "each memory budget alone can be kept, but not all together; with the smallest excess "
            f"in all {text}"
        )
    return MemoryBudgetError(text, shortages=tuple(shortages), jointly=jointly, frugal=frugal)


def _shortage(problem: Problem, row: int, choices: tuple[int, ...]) -> MemoryShortage:
    used = sum(
        float(v.memory_bytes[row][c]) for v, c in zip(problem.variables, choices, strict=True)
    )
    return MemoryShortage(
        row=problem.memory[row].name,
        budget_bytes=problem.memory[row].budget_bytes,
        minimum_bytes=problem.memory[row].fixed_bytes + used,
        choices=choices,
    )


# minimize sum_r sum_v bytes_rv[x_v]
def _memory_problem(problem: Problem, rows: Sequence[int]) -> Problem:
    """Bytes of some rows as the cost."""
    return Problem(
        variables=tuple(
            _plain_variable(v.name, _allowed(v) + sum(v.memory_bytes[row] for row in rows))
            for v in problem.variables
        ),
        edges=tuple(_plain_edge(edge, edge.left, edge.right) for edge in problem.edges),
        windows=(),
        memory=(),
    )


# minimize sum_r max(budget_r, sum_v bytes_rv[x_v])
def _excess_problem(problem: Problem) -> Problem:
    """Bytes over budget as the cost: a window for each row, whose compute is the budget.

    The bytes are the window's communication, on an edge from each variable to itself. Rows without
    a limit have no part in it.
    """
    limited = [
        (index, row) for index, row in enumerate(problem.memory) if math.isfinite(row.budget_bytes)
    ]
    budgets = tuple(
        Variable(
            name=row.name,
            cost_us=np.zeros(1),
            window=index,
            window_compute_us=np.array([row.budget_bytes - row.fixed_bytes]),
            memory_bytes=(),
        )
        for index, (_, row) in enumerate(limited)
    )
    used = tuple(
        Edge(
            name=row.name,
            left=index,
            right=index,
            left_labels=np.arange(len(variable.cost_us)),
            right_labels=np.zeros(len(variable.cost_us), dtype=np.int64),
            cost_us=np.zeros((len(variable.cost_us), 1)),
            window=window,
            window_communication_us=np.asarray(variable.memory_bytes[position])[:, None],
        )
        for window, (position, row) in enumerate(limited)
        for index, variable in enumerate(problem.variables)
    )
    return Problem(
        variables=tuple(_plain_variable(v.name, _allowed(v)) for v in problem.variables) + budgets,
        edges=tuple(_plain_edge(edge, edge.left, edge.right) for edge in problem.edges) + used,
        windows=tuple(Window(name=row.name, multiplicity=1) for _, row in limited),
        memory=(),
    )
