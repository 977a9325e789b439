"""Choices for problems under a budget: where a search begins, and what of its result goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gt_autoparallel.errors import InfeasiblePlacementError, SolverError
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.problem.problem_of_graph import PlacementProblem
from gt_autoparallel.solver import Relaxation, Solution, evaluate, solve


def bounded_solution(
    placement: PlacementProblem,
    choices: tuple[int, ...],
    bounded: Relaxation,
    gap: float,
    began: float,
) -> Solution:
    """A choice within the gap that was asked for, by the bound of a relaxation.

    ``began`` is when solving did, on the clock of ``time.perf_counter``.
    """
    found = evaluate(placement.problem, choices)
    return Solution(
        choices=choices,
        objective_us=found.objective_us,
        lower_bound_us=min(bounded.lower_bound_us, found.objective_us),
        gap=gap,
        proven=True,
        method="layers bounded one by one",
        seconds={"total": time.perf_counter() - began},
        memory_bytes=found.memory_bytes,
        memory_prices=bounded.memory_prices,
        warm_start=bounded.warm_start,
    )


def recomputing(
    placement: PlacementProblem, options: Sequence[NodeOption], time_limit_seconds: float
) -> tuple[int, ...]:
    """The best choice that places nodes by ``options`` and runs again what the budget asks for.

    If even that is too much, the one that runs nothing again.
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
        return solve(part, time_limit_seconds=0.1 * time_limit_seconds).choices
    except (InfeasiblePlacementError, SolverError):
        return placement.solution_of(options)


def without_idle_work(placement: PlacementProblem, solution: Solution) -> Solution:
    """The solution, in which nothing runs again for nobody."""
    recomputed = placement.recomputed_nodes(solution.choices)
    if recomputed == placement.chosen_again(solution.choices):
        return solution
    options = placement.options_of_nodes(solution.choices)
    choices = placement.solution_of(options, recomputed)
    objective_us = evaluate(placement.problem, choices).objective_us
    return replace(solution, choices=choices, objective_us=objective_us)
