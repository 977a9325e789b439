"""Sees to it that the result costs no more than choices of a certain kind, if time allows.

A search may end with a gap, and then a plan that somebody knows might be cheaper. A *rival* is a
kind of choices, stated as the options that they may take: what an expert does, for example. After
the search each rival's part of the problem is bounded, with the best choice's cost as the cutoff.
Nearly always one sweep of dual ascent on the whole problem, in which all else costs more, proves
that nothing in it costs less; if not, the part is made, bounded by a few sweeps more, and searched
to its optimum, or looked at as a whole (``most_parts``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from gt_autoparallel.solver.bounding import Bounding, SearchPart, SearchSettings
from gt_autoparallel.solver.deadline import Deadline
from gt_autoparallel.solver.dominance import drop_dominated
from gt_autoparallel.solver.incumbent import PRECISION, Incumbent, less_by
from gt_autoparallel.solver.message_passing import DualAscent, Prices
from gt_autoparallel.solver.problem import BoolArray, FloatArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem
from gt_autoparallel.solver.search import Search

Rival = Sequence[BoolArray]
"""For each variable [num_options]: which options the rival's choices may take."""

_SWEEPS = 6
"""Sweeps of dual ascent before a rival's part is searched, at most."""


def beat_rivals(
    incumbent: Incumbent,
    whole: ReducedProblem,
    rivals: Sequence[Rival],
    *,
    prices: Prices,
    settings: SearchSettings,
    deadline: float,
    most_parts: float = math.inf,
) -> None:
    """Offers ``incumbent``, what a search ended with, what is cheaper in any rival's part.

    ``whole`` is the problem before the search dropped anything from it, ``prices`` are those that
    it ended with. Rivals that leave no choice are passed over, and those that are left at the
    deadline (by ``time.perf_counter``). ``most_parts`` are looked at of each rival.
    """
    if not rivals or time.perf_counter() >= deadline:
        return
    ascent = DualAscent(whole.copy(), prices)
    for forward in (True, False, True):
        ascent.sweep(forward=forward)
    bounds = ascent.option_bounds()
    for rival in rivals:
        if time.perf_counter() >= deadline:
            break
        known = min(incumbent.objective_us, incumbent.below_us)
        masks = [allowed[node.options] for allowed, node in zip(rival, whole.nodes, strict=True)]
        if _least(masks, bounds) >= known:
            continue
        if known < math.inf and ascent.bound_within(masks, penalty_us=known) >= known:
            continue
        part = SearchPart(whole.copy(), prices)
        if not part.drop(masks):
            continue
        drop_dominated(part.reduced)
        part.reduced.compact_links()
        contest = Search(
            problem=incumbent.problem,
            reduced=part.reduced,
            gap=0.0,
            deadline=Deadline(deadline),
            progress=None,
            settings=settings,
            start=time.perf_counter(),
            below_us=less_by(known, PRECISION),
            most_parts=most_parts,
        )
        contest.prices = part.prices
        bounding = Bounding(
            incumbent.problem, contest.incumbent, settings, contest.deadline.is_over
        )
        if bounding.settle(part, part.prices, sweeps=_SWEEPS):
            contest.run()
        if contest.incumbent.objective_us < math.inf:
            incumbent.offer(contest.incumbent.choices)


def _least(masks: Sequence[BoolArray], bounds: Sequence[FloatArray]) -> float:
    """No choice of a rival costs less: of every node it takes one of the options that it may."""
    least = -math.inf
    for mask, values in zip(masks, bounds, strict=True):
        among = values[mask]
        least = max(least, float(among.min()) if len(among) else math.inf)
    return least
