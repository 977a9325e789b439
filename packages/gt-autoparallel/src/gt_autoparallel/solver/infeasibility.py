"""Why there is no choice at all: which forbidden pairs, or which budget and by how much."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from gt_autoparallel.errors import InfeasiblePlacementError, SolverError
from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.problem import Edge, FloatArray, Problem, Variable, Window
from gt_autoparallel.solver.reduced_problem import ReducedProblem, reduce_problem
from gt_autoparallel.solver.solution import (
    ForbiddenPairsError,
    MemoryBudgetError,
    MemoryShortage,
    Solution,
)

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
