"""The best choice yet, and below which cost another one is worth looking for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.price_model import PriceModel
from gt_autoparallel.solver.problem import Problem

PRECISION = 1e-10
"""Relative difference of objectives that counts as none."""


def less_by(cost_us: float, part: float) -> float:
    """What is less than a cost by a part of it; inf stays."""
    return cost_us - part * abs(cost_us) if math.isfinite(cost_us) else cost_us


@dataclass(slots=True)
class Incumbent:
    """Takes choices from wherever they come and keeps the best that keeps the budgets."""

    problem: Problem
    gap: float
    """Relative gap at which the search may end."""
    price_model: PriceModel
    """Told every choice of finite cost: each bounds what prices can give."""

    below_us: float = math.inf
    """Choices that cost this or more are not worth looking for, since another one is known."""

    choices: tuple[int, ...] = ()
    objective_us: float = math.inf
    total_bytes: float = math.inf
    _refused: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def cutoff_us(self) -> float:
        """Choices that cost this or more are not worth looking for.

        The gap ends a search of which the best choice costs ``below_us`` or hardly more, too.
        """
        return min(self.below_us, less_by(self.objective_us, max(self.gap, PRECISION)))

    def offer(self, choices: tuple[int, ...]) -> bool:
        """Takes ``choices`` if they keep the budgets and cost less than the best yet.

        Among equal costs fewer bytes are better.

        Returns:
            Whether the choices keep the budgets and take nothing forbidden.
        """
        if choices in self._refused:
            return False
        found = evaluate(self.problem, choices)
        if found.objective_us == math.inf:
            self._refused.add(choices)
            return False
        self.price_model.add(choices, found)
        if any(found.excess_bytes(self.problem)):
            self._refused.add(choices)
            return False
        room = PRECISION * 1e-2 * abs(found.objective_us)
        total_bytes = math.fsum(found.memory_bytes)
        cheaper = found.objective_us < self.objective_us - room
        as_cheap = found.objective_us <= self.objective_us + room
        if cheaper or (as_cheap and total_bytes < self.total_bytes):
            self.choices, self.objective_us = choices, found.objective_us
            self.total_bytes = total_bytes
        return True
