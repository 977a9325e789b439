"""Random placement problems, small ones for brute force and larger ones shaped like models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.problem import (
    Block,
    Edge,
    FloatArray,
    MemoryRow,
    Problem,
    Variable,
    Window,
)


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


def random_block_problem(
    seed: int, *, size: int = 3, inner: int = 3, outer: int = 2, max_options: int = 2
) -> Problem:
    """A random problem of whose variables the first ``inner`` stand for ``size`` alike things.

    Every window belongs to the things. The first memory row, if there is one, has passing bytes.
    """
    problem = random_problem(
        seed, num_variables=inner + outer, max_options=max_options, forbidden=0.05
    )
    rng = np.random.default_rng(seed)
    variables = [
        replace(variable, memory_bytes=tuple(row * size for row in variable.memory_bytes))
        for variable in problem.variables
    ]
    passing = [
        rng.integers(-2, 5, len(variable.cost_us)) * 1e9
        if problem.memory and variable.memory_bytes[0].any()
        else np.zeros(len(variable.cost_us))
        for variable in variables[:inner]
    ]
    for index, bytes_at_work in enumerate(passing):
        rows = variables[index].memory_bytes
        if rows:
            variables[index] = replace(
                variables[index], memory_bytes=(rows[0] + bytes_at_work, *rows[1:])
            )
    memory = []
    for number, row in enumerate(problem.memory):
        low = sum(float(v.memory_bytes[number].min()) for v in variables)
        high = sum(float(v.memory_bytes[number].max()) for v in variables)
        budget = row.fixed_bytes + math.floor(low + float(rng.uniform()) * (high - low))
        memory.append(replace(row, budget_bytes=budget))
    block = Block(
        name="things",
        size=size,
        variables=tuple(range(inner)),
        windows=tuple(range(len(problem.windows))),
        passing_bytes={0: tuple(passing)} if problem.memory else {},
    )
    return replace(
        problem,
        variables=tuple(variables),
        windows=tuple(replace(window, multiplicity=size) for window in problem.windows),
        memory=tuple(memory),
        blocks=(block,),
    )


def cost_of_mixture(
    problem: Problem, things: Sequence[Sequence[int]], outer: Sequence[int]
) -> tuple[float, list[float]]:
    """What a problem of one block, of its first variables, costs, and bytes of each memory row.

    ``things`` are the options of each thing, ``outer`` those of the other variables. Straight from
    what the problem's numbers mean: costs and kept bytes are those of all things together.
    """
    (block,) = problem.blocks
    inner, size = len(block.variables), block.size
    total = problem.fixed_us
    at_most = [-math.inf] * len(problem.memory)
    kept = [row.fixed_bytes for row in problem.memory]
    compute = [[0.0] * size for _ in problem.windows]
    communication = [[0.0] * size for _ in problem.windows]
    passing = [0.0] * size
    for thing in range(size):
        choices = (*things[thing], *outer)
        for index, (variable, choice) in enumerate(zip(problem.variables, choices, strict=True)):
            share = 1.0 / size if index < inner else float(thing == 0)
            total += share * variable.cost_us[choice] if share else 0.0
            if variable.window is not None:
                compute[variable.window][thing] += variable.window_compute_us[choice]
            for number, row in enumerate(variable.memory_bytes):
                at_work = block.passing_bytes.get(number) if index < inner else None
                own = 0.0 if at_work is None else at_work[index][choice]
                kept[number] += share * (row[choice] - own)
                if number == 0:
                    passing[thing] += own
        for each in problem.edges:
            pair = (each.left_labels[choices[each.left]], each.right_labels[choices[each.right]])
            is_inner = each.left < inner or each.right < inner
            if is_inner or thing == 0:
                total += each.cost_us[pair] / (size if is_inner else 1)
            if each.window is not None:
                communication[each.window][thing] += each.window_communication_us[pair]
    for window in range(len(problem.windows)):
        total += sum(map(max, compute[window], communication[window]))
    for number in range(len(problem.memory)):
        at_most[number] = kept[number] + (max(passing) if number == 0 else 0.0)
    return total, at_most


def brute_force_mixtures(problem: Problem) -> float:
    """The least objective of any mixture within the budgets; inf for none."""
    (block,) = problem.blocks
    counts = [len(variable.cost_us) for variable in problem.variables]
    inner = list(itertools.product(*(range(n) for n in counts[: len(block.variables)])))
    outer = list(itertools.product(*(range(n) for n in counts[len(block.variables) :])))
    best = math.inf
    for rest in outer:
        # Things are alike: who takes which variant does not matter.
        for things in itertools.combinations_with_replacement(inner, block.size):
            cost, taken = cost_of_mixture(problem, things, rest)
            fits = all(
                used <= row.budget_bytes for used, row in zip(taken, problem.memory, strict=True)
            )
            if fits:
                best = min(best, cost)
    return best
