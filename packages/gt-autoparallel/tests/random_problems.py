"""Random placement problems, small ones for brute force and larger ones shaped like models."""

from __future__ import annotations

import itertools
import math

import numpy as np

from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.problem import Edge, FloatArray, MemoryRow, Problem, Variable, Window


def random_problem(
    seed: int,
    *,
    num_variables: int | None = None,
    max_options: int = 4,
    tightness: float | None = None,
    forbidden: float | None = None,
) -> Problem:
    """A problem with windows, self-edges, parallel edges, memory rows, forbidden pairs and ties.

    Args:
        seed: everything follows from it.
        num_variables: 3 to 8 if None.
        max_options: each variable has 1 to this many.
        tightness: budgets as a share of the way from the least to the most bytes; drawn if None.
        forbidden: share of entries that are inf; drawn if None.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9)) if num_variables is None else num_variables
    if forbidden is None:
        forbidden = float(rng.choice([0.0, 0.1, 0.3]))
    coarse = rng.random() < 0.5
    num_windows, num_rows = int(rng.integers(0, 4)), int(rng.integers(0, 4))

    def numbers(*shape: int) -> FloatArray:
        if coarse:
            return rng.integers(0, 4, shape).astype(np.float64)
        return np.round(np.exp(rng.normal(2.0, 2.0, shape)), 3)

    def costs(*shape: int) -> FloatArray:
        return np.where(rng.random(shape) < forbidden, np.inf, numbers(*shape))

    variables = []
    for index in range(count):
        size = int(rng.integers(1, max_options + 1))
        window = int(rng.integers(num_windows)) if num_windows and rng.random() < 0.6 else None
        variables.append(
            Variable(
                name=f"v{index}",
                cost_us=costs(size),
                window=window,
                window_compute_us=numbers(size) if window is not None else np.zeros(size),
                memory_bytes=tuple(
                    rng.integers(0, 10, size).astype(np.float64) * 1e9
                    if rng.random() < 0.7
                    else np.zeros(size)
                    for _ in range(num_rows)
                ),
            )
        )
    edges = []
    for index in range(int(count * rng.uniform(0.8, 2.0))):
        left, right = (int(rng.integers(count)) for _ in range(2))
        if rng.random() < 0.7:
            left, right = sorted((left, (left + 1) % count))
        window = int(rng.integers(num_windows)) if num_windows and rng.random() < 0.4 else None
        sizes = [int(rng.integers(1, 4)) for _ in range(2)]
        table = costs(*sizes)
        edges.append(
            Edge(
                name=f"e{index}",
                left=left,
                right=right,
                left_labels=rng.integers(0, sizes[0], len(variables[left].cost_us)),
                right_labels=rng.integers(0, sizes[1], len(variables[right].cost_us)),
                cost_us=table,
                window=window,
                window_communication_us=(
                    numbers(*sizes) if window is not None else np.zeros(sizes)
                ),
            )
        )
    memory = []
    for row in range(num_rows):
        low = sum(float(v.memory_bytes[row].min()) for v in variables)
        high = sum(float(v.memory_bytes[row].max()) for v in variables)
        share = float(rng.uniform(0.0, 1.0)) if tightness is None else tightness
        fixed = float(rng.integers(0, 5) * 1e9)
        memory.append(
            MemoryRow(
                name=f"m{row}",
                budget_bytes=fixed + math.floor(low + share * (high - low)),
                fixed_bytes=fixed,
            )
        )
    return Problem(
        variables=tuple(variables),
        edges=tuple(edges),
        windows=tuple(
            Window(name=f"w{i}", multiplicity=int(rng.choice([1, 2, 32])))
            for i in range(num_windows)
        ),
        memory=tuple(memory),
        fixed_us=float(rng.integers(0, 100)),
    )


def brute_force(problem: Problem) -> tuple[float, float]:
    """The least objective of any choice, within the budgets and without them; inf for none."""
    best = best_without_budgets = math.inf
    for choices in itertools.product(*(range(len(v.cost_us)) for v in problem.variables)):
        found = evaluate(problem, choices)
        best_without_budgets = min(best_without_budgets, found.objective_us)
        if not any(found.excess_bytes(problem)):
            best = min(best, found.objective_us)
    return best, best_without_budgets
