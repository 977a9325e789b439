"""What solving gives: a choice with its certificate, or what stands in the way of any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gt_autoparallel.errors import InfeasiblePlacementError
from gt_autoparallel.solver.message_passing import Prices
from gt_autoparallel.solver.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the solver knows at one moment."""

    stage: str
    incumbent_us: float
    """Objective of the best choice yet; inf before there is one."""

    lower_bound_us: float
    """No choice costs less; -inf before there is a bound."""

    num_options: int
    """Options that may still be part of a better choice, of all variables."""

    seconds: float
    """Since the solve began."""

    @property
    def gap(self) -> float:
        """Relative distance of incumbent and bound; see ``Solution.gap``."""
        return relative_gap(self.incumbent_us, self.lower_bound_us)

    def __str__(self) -> str:
        return (
            f"{self.stage}: {self.incumbent_us:.2f} us, bound {self.lower_bound_us:.2f} us, "
            f"gap {self.gap:.2%}, {self.num_options} options, {self.seconds:.1f} s"
        )


MOST_CANDIDATES = 40
"""Choices that a warm start hands on, besides the best one."""

ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What one solve can tell the next one of a problem with the same variables and edges.

    Nothing in it is trusted: it only tells where to begin, so it may come from a problem with
    other budgets, costs or forbidden options.
    """

    choices: tuple[int, ...]
    """The best choice."""

    candidates: tuple[tuple[int, ...], ...] = ()
    """Other choices that the search met: as they cost now, they tell about prices."""

    window_prices: tuple[float, ...] = ()
    """For each window the share of its price that compute bears, between 0 and 1."""

    memory_prices: tuple[float, ...] = ()
    """For each memory row: us per byte."""

    def fitting_choices(self, problem: Problem) -> list[tuple[int, ...]]:
        """The choices and candidates that are choices of ``problem``."""
        counts = [len(variable.cost_us) for variable in problem.variables]
        return [
            choices
            for choices in (self.choices, *self.candidates)
            if len(choices) == len(counts)
            and all(0 <= choice < count for choice, count in zip(choices, counts, strict=True))
        ]

    def fitting_prices(self, problem: Problem) -> Prices | None:
        """The prices, if they are those of a problem with as many windows and memory rows."""
        counts = (len(problem.windows), len(problem.memory))
        if (len(self.window_prices), len(self.memory_prices)) != counts:
            return None
        return Prices(
            windows=np.array(self.window_prices, dtype=np.float64),
            memory=np.array(self.memory_prices, dtype=np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice that was found, and how far from the best it can be."""

    choices: tuple[int, ...]
    """[variables] Index of the option that each variable takes."""

    objective_us: float
    """Evaluated from the problem and ``choices`` alone."""

    lower_bound_us: float
    """No choice that satisfies the problem costs less."""

    gap: float
    """(objective - bound) / |objective|, at least 0."""

    proven: bool
    """Whether ``gap`` is at most the larger of the gap asked for and 1e-9."""

    method: str
    """Which stage closed the gap, or that the time limit ended the search."""

    seconds: Mapping[str, float]
    """Wall-clock seconds of each stage, and their ``total``."""

    memory_bytes: tuple[float, ...]
    """Bytes of each memory row, with the fixed ones."""

    memory_prices: tuple[float, ...]
    """Dual of each memory row, us per byte: what one more byte of budget would save."""

    warm_start: WarmStart
    """Where the solve of a similar problem may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShortage:
    """One memory row that cannot be satisfied."""

    row: str
    budget_bytes: float
    minimum_bytes: float
    """What the most frugal choice takes in this row, with the fixed bytes. If the rows are
    infeasible only together: what the choice with the smallest excess in all takes."""

    choices: tuple[int, ...]
    """The choice that takes ``minimum_bytes``."""

    @property
    def excess_bytes(self) -> float:
        """Bytes that the budget lacks."""
        return self.minimum_bytes - self.budget_bytes


class ForbiddenPairsError(InfeasiblePlacementError):
    """No combination of options avoids every forbidden option and pair.

    Attributes:
        variables: indices of variables that together leave no combination.
        edges: indices of the edges between them that forbid it; without any one of these there
            is a combination (unless ``minimal`` is False). Empty if one variable alone has no
            option of finite cost.
        minimal: whether the set was reduced as far as it can be.
    """

    def __init__(
        self, message: str, *, variables: tuple[int, ...], edges: tuple[int, ...], minimal: bool
    ) -> None:
        super().__init__(message)
        self.variables = variables
        self.edges = edges
        self.minimal = minimal


class MemoryBudgetError(InfeasiblePlacementError):
    """Combinations exist, but each exceeds a memory budget.

    Attributes:
        shortages: the rows that no choice satisfies even alone; else, with ``jointly`` True, the
            rows that the choice with the smallest excess in all exceeds.
        jointly: whether each row could be satisfied alone.
        frugal: a choice that takes the least of all rows together.
    """

    def __init__(
        self,
        message: str,
        *,
        shortages: tuple[MemoryShortage, ...],
        jointly: bool,
        frugal: tuple[int, ...],
    ) -> None:
        super().__init__(message)
        self.shortages = shortages
        self.frugal = frugal
        self.jointly = jointly


def relative_gap(objective_us: float, lower_bound_us: float) -> float:
    """(objective - bound) / |objective|, at least 0; inf without either."""
    difference = objective_us - lower_bound_us
    if difference <= 0.0:
        return 0.0
    if not difference < float("inf"):
        return float("inf")
    return difference / max(abs(objective_us), 1e-300)
