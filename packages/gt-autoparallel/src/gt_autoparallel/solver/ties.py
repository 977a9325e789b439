"""Takes a choice with fewer bytes among those that cost the same.

Where the bytes of a plan do not matter for its cost, a search ends at any of many choices of equal
cost. So afterwards bytes get a price, so small that all of them together would cost a millionth of
the objective, and HiGHS solves the MILP over the options that cost nothing more than the best ones:
those whose min-marginals are equal to the least of their node. What it finds is taken only if the
cost, without that price, is no more than before.
"""

from __future__ import annotations

import math

from gt_autoparallel.solver.bounding import SearchPart, with_settled_windows
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.reduced_problem import ReducedProblem
from gt_autoparallel.solver.search import Search

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
