"""What a choice of options costs, straight from the problem: no reductions, no solver.

Every objective that this package reports comes from here, whatever found the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gt_autoparallel.solver.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvaluation:
    """The exact value of one choice for each variable."""

    objective_us: float
    """Inf if the choice takes a forbidden option or pair. Budgets do not enter."""

    window_compute_us: tuple[float, ...]
    """Compute of one instance of each window."""

    window_communication_us: tuple[float, ...]
    """Communication of one instance of each window."""

    memory_bytes: tuple[float, ...]
    """Bytes that each memory row takes, with the fixed ones."""

    def excess_bytes(self, problem: Problem) -> tuple[float, ...]:
        """Bytes that each memory row takes beyond its budget; zeros where it does not."""
        return tuple(
            max(0.0, used - row.budget_bytes)
            for used, row in zip(self.memory_bytes, problem.memory, strict=True)
        )


def evaluate(problem: Problem, choices: Sequence[int]) -> ChoiceEvaluation:
    """Evaluates the objective of ``problem`` for one option of each variable.

    The terms are added with ``math.fsum``: the result does not depend on their order.
    """
    full = [problem.fixed_us]
    compute: list[list[float]] = [[] for _ in problem.windows]
    communication: list[list[float]] = [[] for _ in problem.windows]
    memory = [[row.fixed_bytes] for row in problem.memory]
    for variable, choice in zip(problem.variables, choices, strict=True):
        full.append(float(variable.cost_us[choice]))
        if variable.window is not None:
            compute[variable.window].append(float(variable.window_compute_us[choice]))
        for window, times in variable.further_compute_us.items():
            compute[window].append(float(times[choice]))
        for terms, row in zip(memory, variable.memory_bytes, strict=True):
            terms.append(float(row[choice]))
    for edge in problem.edges:
        pair = (edge.left_labels[choices[edge.left]], edge.right_labels[choices[edge.right]])
        full.append(float(edge.cost_us[pair]))
        if edge.window is not None:
            communication[edge.window].append(float(edge.window_communication_us[pair]))
    compute_us = tuple(math.fsum(terms) for terms in compute)
    communication_us = tuple(math.fsum(terms) for terms in communication)
    full += [
        window.multiplicity * max(times)
        for window, *times in zip(problem.windows, compute_us, communication_us, strict=True)
    ]
    finite = bool(np.isfinite(full).all())
    return ChoiceEvaluation(
        objective_us=math.fsum(full) if finite else math.inf,
        window_compute_us=compute_us,
        window_communication_us=communication_us,
        memory_bytes=tuple(math.fsum(terms) for terms in memory),
    )
