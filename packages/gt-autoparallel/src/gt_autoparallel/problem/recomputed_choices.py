"""Choices for problems under a budget: where a search begins, and what of its result goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gt_autoparallel.errors import InfeasiblePlacementError, SolverError
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.problem.problem_of_graph import PlacementProblem
from gt_autoparallel.solver import Mixture, Solution, WarmStart, evaluate, solve


def recomputing(
    placement: PlacementProblem,
    options: Sequence[NodeOption],
    relative_gap: float,
    time_limit_seconds: float,
) -> WarmStart:
    """The best choice that places nodes by ``options`` and runs again what the budget asks for.

    It may cost more than the best one by ``relative_gap``. If even that is too much, the one that
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


def without_idle_work(placement: PlacementProblem, solution: Solution) -> Solution:
    """The solution, in which nothing runs again for nobody."""
    recomputed = placement.recomputed_nodes(solution.choices)
    if recomputed == placement.chosen_again(solution.choices):
        return solution
    options = placement.options_of_nodes(solution.choices)
    choices = placement.solution_of(options, recomputed)
    objective_us = evaluate(placement.problem, choices).objective_us
    return replace(solution, choices=choices, objective_us=objective_us)


def mixture_without_idle_work(placement: PlacementProblem, mixture: Mixture) -> Mixture:
    """The mixture, in which nothing runs again for nobody."""
    recomputed = placement.recomputed_nodes(mixture)
    if recomputed == placement.chosen_again(mixture):
        return mixture
    return placement.mixture_of(placement.options_of_nodes(mixture), recomputed)
