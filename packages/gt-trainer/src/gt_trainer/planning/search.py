"""Best first, and nothing that could still win is cut: the search, whatever a candidate is.

Each candidate has a lower bound on its cost for each goal (a machine, say), and a guess at it. The
guess says who is next; only bounds cut. A candidate is cut for good when for every goal something
simulated is no worse than its bound (and, at equality, came earlier), so that a search that ends
with nothing left has found exactly what simulating everything would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

ItemT = TypeVar("ItemT")


class WrongBoundError(ValueError):
    """Something costs less than its bound, so that the bounds cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded(Generic[ItemT]):
    """A candidate before it is simulated."""

    item: ItemT
    bounds: tuple[float, ...]
    """For each goal what it cannot cost less than; infinite where it cannot be at all."""

    guess: float
    """What it is thought to cost. Only the order depends on it."""


class Frontier(Generic[ItemT]):
    """Candidates that nobody has simulated yet, and the best that was found.

    Args:
        candidates: in any order, which decides between equals.
    """

    def __init__(self, candidates: Iterable[Bounded[ItemT]]) -> None:
        self._all = list(candidates)
        self.num_goals = len(self._all[0].bounds) if self._all else 0
        bounds = np.array([each.bounds for each in self._all], dtype=np.float64)
        self._bounds = bounds.reshape(len(self._all), self.num_goals)
        self._best: list[tuple[float, int]] = [(math.inf, -1)] * self.num_goals
        self._is_open = np.ones(len(self._all), dtype=np.bool_)
        self.reorder(np.array([each.guess for each in self._all], dtype=np.float64))

    @property
    def num_candidates(self) -> int:
        """All that there were."""
        return len(self._all)

    @property
    def num_left(self) -> int:
        """Those that could still win."""
        return len(self._waiting())

    @property
    def num_cut(self) -> int:
        """Those that were not taken and can win nothing any more."""
        return int(np.count_nonzero(self._is_open)) - self.num_left

    def best(self, goal: int = 0) -> tuple[float, ItemT] | None:
        """The least cost for a goal, and whose it is; None before anything was found."""
        cost, index = self._best[goal] if self._best else (math.inf, -1)
        return (cost, self._all[index].item) if index >= 0 else None

    def reorder(self, guesses: NDArray[np.float64]) -> None:
        """Put those that could still win in another order.

        Args:
            guesses: of all candidates.
        """
        waiting = self._waiting()
        in_order = waiting[np.argsort(guesses[waiting], kind="stable")]
        self._queue = iter(in_order.tolist())

    def take(self) -> tuple[int, ItemT] | None:
        """The next to simulate with its number; None if none is left that could win."""
        for index in self._queue:
            if self._is_open[index] and self._can_win(index):
                self._is_open[index] = False
                return index, self._all[index].item
        return None

    def take_also(self, is_wanted: Callable[[int, ItemT], bool]) -> list[tuple[int, ItemT]]:
        """All that could win and are wanted, by number and item, beside one that was taken.

        Args:
            is_wanted: is only asked of those that could win.
        """
        waiting = self._waiting().tolist()
        found = [index for index in waiting if is_wanted(index, self._all[index].item)]
        self._is_open[found] = False
        return [(index, self._all[index].item) for index in found]

    def put_back(self, number: int) -> None:
        """One that was taken was not simulated after all: it is left."""
        self._is_open[number] = True

    def record(self, number: int, costs: Sequence[float]) -> None:
        """What was found for one that was taken; infinite for what cannot be.

        Raises:
            WrongBoundError: it costs less than its bound. Nothing is recorded.
        """
        for goal, cost in enumerate(costs):
            bound = self._all[number].bounds[goal]
            if cost < bound * (1 - 1e-9):
                raise WrongBoundError(
                    f"{self._all[number].item} costs {cost:g}, and its bound is {bound:g}"
                )
        for goal, cost in enumerate(costs):
            if math.isfinite(cost):
                self._best[goal] = min(self._best[goal], (cost, number))

    def _can_win(self, index: int) -> bool:
        bounds = self._all[index].bounds
        return any((bound, index) < best for bound, best in zip(bounds, self._best, strict=True))

    def _waiting(self) -> NDArray[np.intp]:
        """The numbers of those that were not taken and can win, ascending."""
        numbers = np.arange(len(self._all))
        can_win = np.zeros(len(self._all), dtype=np.bool_)
        for bounds, (cost, number) in zip(self._bounds.T, self._best, strict=True):
            can_win |= (bounds < cost) | ((bounds == cost) & (numbers < number))
        return np.flatnonzero(self._is_open & can_win)


def search(
    candidates: Iterable[Bounded[ItemT]], simulate: Callable[[ItemT], Sequence[float]]
) -> Frontier[ItemT]:
    """Simulate candidates one after another until none is left that could win."""
    frontier = Frontier(candidates)
    while (taken := frontier.take()) is not None:
        number, item = taken
        frontier.record(number, simulate(item))
    return frontier
