"""What each option of each variable costs at least, of all variables at once.

The min-marginals of dual ascent (``message_passing``) at good prices: what any choice that takes an
option costs, from below, mixtures included. One bound for thousands of questions "what if that were
otherwise?", of which the few that matter can then be asked by solving.
"""

from __future__ import annotations

import math
import time

import numpy as np

from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import SearchPart, with_settled_windows
from gt_autoparallel.solver.message_passing import DualAscent, Prices
from gt_autoparallel.solver.mixed_search import solve_mixed
from gt_autoparallel.solver.problem import FloatArray, Problem
from gt_autoparallel.solver.reduced_problem import reduce_problem
from gt_autoparallel.solver.solution import WarmStart

_SHARE_OF_PRICES = 0.5
"""Of the time limit: what prices may take."""

_LEAST_GAIN = 1e-5
"""Of the bound: sweeps that raise it by less end the ascent."""


def option_bounds(
    problem: Problem, *, near: tuple[int, ...], time_limit_seconds: float
) -> tuple[FloatArray, ...]:
    """For each variable [options] what any choice with the option costs at least, in us.

    Args:
        problem: which ``check_problem`` would accept, and in which a choice is possible.
        near: a good choice; prices are looked for around it.
        time_limit_seconds: what time allows is a bound, too, and a lower one.
    """
    start = time.perf_counter()
    known = solve_mixed(
        problem,
        relative_gap=0.0,
        time_limit_seconds=_SHARE_OF_PRICES * time_limit_seconds,
        warm_start=WarmStart(choices=near),
    ).warm_start
    reduced = reduce_problem(problem)
    assert make_arc_consistent(reduced) is None, "a choice is possible"
    reduced.compact_links()
    reduced.settle_windows()
    prices = Prices(windows=np.array(known.window_prices), memory=np.array(known.memory_prices))
    part = SearchPart(reduced, with_settled_windows(reduced, prices))
    ascent = DualAscent(reduced, part.prices)
    last = -math.inf
    while True:
        ascent.sweep(forward=True)
        ascent.sweep(forward=False)
        bound = ascent.swept_bound
        is_late = time.perf_counter() - start > time_limit_seconds
        if is_late or bound - last <= _LEAST_GAIN * abs(bound):
            break
        last = bound
    ascent.sweep(forward=True)
    found = []
    for variable, node, bounds in zip(
        problem.variables, reduced.nodes, ascent.option_bounds(), strict=True
    ):
        of_all = np.full(len(variable.cost_us), np.inf)
        of_all[node.options] = bounds
        found.append(of_all)
    return tuple(found)
