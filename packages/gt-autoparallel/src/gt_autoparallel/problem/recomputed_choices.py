"""Where a search under a budget begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gt_autoparallel.errors import InfeasiblePlacementError, SolverError
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.problem.problem_of_graph import PlacementProblem
from gt_autoparallel.solver import WarmStart, solve


def recomputing(
    placement: PlacementProblem,
    options: Sequence[NodeOption],
    relative_gap: float,
    time_limit_seconds: float,
) -> WarmStart:
    """A choice that places nodes by ``options`` and runs again what the budget asks for.

    It costs at most ``relative_gap`` more than the best one. If even that is too much, the one that
    runs nothing again, without prices.
    """
    members = placement.clustering.members
    variables = [
        replace(
            variable,
            cost_us=np.where(
                [choice.option == options[nodes[0]] for choice in choices], variable.cost_us, np.inf
            ),
        )
        for variable, choices, nodes in zip(
            placement.problem.variables, placement.choices, members, strict=True
        )
    ]
    part = replace(placement.problem, variables=tuple(variables))
    try:
        found = solve(part, relative_gap=relative_gap, time_limit_seconds=0.1 * time_limit_seconds)
    except (InfeasiblePlacementError, SolverError):
        return WarmStart(choices=placement.solution_of(options))
    return replace(found.warm_start, candidates=())
