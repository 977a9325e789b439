"""Of choices of equal cost one with few bytes is taken, and the cost is what it was."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from random_problems import random_problem
from small_problems import edge, variable

from gt_autoparallel.solver import ForbiddenPairsError, solve
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.problem import MemoryRow, Problem, Window

UNLIMITED = MemoryRow(name="memory", budget_bytes=math.inf, fixed_bytes=0.0)


def without_limits(problem: Problem) -> Problem:
    rows = (dataclasses.replace(row, budget_bytes=math.inf) for row in problem.memory)
    return dataclasses.replace(problem, memory=tuple(rows))


def without_bytes(problem: Problem) -> Problem:
    variables = (dataclasses.replace(v, memory_bytes=()) for v in problem.variables)
    return dataclasses.replace(problem, variables=tuple(variables), memory=())


def test_takes_the_fewest_bytes_of_all_optima_of_brute_force() -> None:
    blind = seen = 0
    for seed in range(150):
        problem = without_limits(random_problem(seed, max_options=3))
        if not problem.memory:
            continue
        try:
            solution = solve(problem)
        except ForbiddenPairsError:
            continue
        plain = solve(without_bytes(problem))
        assert solution.objective_us == pytest.approx(plain.objective_us, rel=1e-9), seed
        assert solution.proven
        fewest = min(
            math.fsum(found.memory_bytes)
            for choices in itertools.product(*(range(len(v.cost_us)) for v in problem.variables))
            for found in [evaluate(problem, choices)]
            if found.objective_us <= solution.objective_us * (1 + 1e-10)
        )
        assert math.fsum(solution.memory_bytes) == fewest, seed
        blind += math.fsum(evaluate(problem, plain.choices).memory_bytes) > fewest
        seen += 1
    assert seen > 40
    assert blind, "no optimum would have taken more: the problems show nothing"


def two_ways(extra_us: float, *, gap: float) -> tuple[tuple[int, ...], float]:
    """Two variables that must go together; the second way takes fewer bytes and costs more."""
    problem = Problem(
        variables=(
            variable("a", [100.0, 100.0 + extra_us], memory_bytes=[[9e9, 4e9]]),
            variable("b", [50.0, 50.0], memory_bytes=[[3e9, 5e9]]),
        ),
        edges=(edge("together", 0, 1, [[0.0, np.inf], [np.inf, 0.0]]),),
        windows=(),
        memory=(UNLIMITED,),
    )
    solution = solve(problem, relative_gap=gap)
    return solution.choices, solution.objective_us


@pytest.mark.parametrize("gap", [0.0, 1e-3])
def test_bytes_decide_between_equals_only(gap: float) -> None:
    assert two_ways(0.0, gap=gap) == ((1, 1), 150.0)
    assert two_ways(1e-5, gap=gap) == ((0, 0), 150.0)


def test_time_that_a_window_hides_is_no_cost() -> None:
    """Compute is longer than either communication, so the shorter one saves nothing."""
    problem = Problem(
        variables=(
            variable("compute", [0.0], window=0, window_compute_us=[10.0], memory_bytes=[[0.0]]),
            variable("sent", [0.0, 0.0], memory_bytes=[[8e9, 2e9]]),
        ),
        edges=(
            edge(
                "e",
                0,
                1,
                [[0.0, 0.0]],
                window=0,
                window_communication_us=np.array([[1.0, 9.0]]),
            ),
        ),
        windows=(Window(name="w", multiplicity=4),),
        memory=(UNLIMITED,),
    )
    solution = solve(problem)
    assert solution.choices == (0, 1)
    assert solution.objective_us == 40.0
    assert solution.proven
    assert solution.memory_prices == (0.0,)
