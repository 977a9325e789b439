"""A bound for choices in which what a variable stands for may differ, and whole choices near it.

A variable may stand for many things that all take its option. If each of them may take another
option of one kind instead (``Variable.kinds``), at the same prices the least of the problem stays
what it was: each takes the cheapest option of the kind, and so may all. Hence Lagrangian bounds,
and the linear relaxation, hold for these choices too; bounds from branching or a MILP do not. What
is dropped is dropped by kinds, since an option that is too dear for all may be right for a few.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import SearchSettings
from gt_autoparallel.solver.problem import Problem
from gt_autoparallel.solver.reduced_problem import reduce_problem
from gt_autoparallel.solver.rivals import Rival, beat_rivals
from gt_autoparallel.solver.search import Search
from gt_autoparallel.solver.solution import ProgressCallback, WarmStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What ``relax`` gives."""

    lower_bound_us: float
    """Nothing costs less, whatever each thing takes of its variable's kind. -inf without a bound,
    inf if the forbidden pairs or budgets leave nothing."""

    choices: tuple[int, ...]
    """The best choice that was met on the way, in which all take the same; empty without one."""

    objective_us: float
    memory_prices: tuple[float, ...]
    warm_start: WarmStart


def relax(
    problem: Problem,
    *,
    relative_gap: float,
    time_limit_seconds: float,
    warm_start: WarmStart | None = None,
    rivals: Sequence[Rival] = (),
    progress: ProgressCallback | None = None,
) -> Relaxation:
    """Bounds ``problem`` from below without branching.

    Args:
        problem: which ``check_problem`` would accept.
        relative_gap: a bound closer to the best choice than this is close enough.
        time_limit_seconds: after this the best bound yet is given.
        warm_start: as for ``solve``.
        rivals: as for ``solve``: the choice costs no more than theirs, if time allows.
        progress: as for ``solve``.
    """
    start = time.perf_counter()
    reduced = reduce_problem(problem)
    if make_arc_consistent(reduced) is not None:
        return _nothing(problem)
    reduced.compact_links()
    whole = reduced.copy()
    reduced.settle_windows()
    search = Search(
        problem=problem,
        reduced=reduced,
        gap=relative_gap,
        deadline=start + time_limit_seconds,
        progress=progress,
        settings=SearchSettings(),
        start=start,
        only_relaxes=True,
    )
    if warm_start is not None:
        search.begin_at(warm_start)
    search.run()
    if search.infeasible and search.lower_bound_us == math.inf:
        return _nothing(problem)
    beat_rivals(search, whole, rivals, deadline=start + time_limit_seconds)
    return Relaxation(
        lower_bound_us=search.lower_bound_us,
        choices=search.incumbent.choices,
        objective_us=search.incumbent.objective_us,
        memory_prices=tuple(search.prices.memory.tolist()),
        warm_start=search.warm_start(),
    )


def _nothing(problem: Problem) -> Relaxation:
    return Relaxation(
        lower_bound_us=math.inf,
        choices=(),
        objective_us=math.inf,
        memory_prices=(0.0,) * len(problem.memory),
        warm_start=WarmStart(choices=()),
    )
