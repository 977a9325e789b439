"""The search of a plan: guesses order candidates, bounds cut them, results correct guesses.

Each candidate has a lower bound on its step time on each machine, and on its memory. A candidate is
cut when on every machine a simulated one is no worse than its bound (and, at equality, came
earlier). A search that ends with no candidate left has therefore found what simulating all
candidates would find.

Guesses only order the rest. Similar candidates are guessed wrong in the same way. The ratio of
result to guess corrects the others of their kind, in time and in memory. After a candidate that
does not fit, those come first that hold less: more recomputation, more stages, a smaller
microbatch. Until one is known to fit on a machine, those come first that hold clearly less than it
has, because a plan may have time for few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

ItemT = TypeVar("ItemT")

Cost = tuple[float, int]
"""Time of a step in microseconds, and bytes of the fullest rank."""

_SURE = {True: 0.9, False: 0.7}
"""Part of a machine's memory within which a candidate is expected to fit, because guesses may be
wrong. It is smaller while none is known to fit."""

_AGAIN = 1.05
"""Factor for candidates that are nearly the same as one that was taken: others teach more."""


class WrongBoundError(ValueError):
    """A candidate costs less than its bound, so that the bounds cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedCandidate(Generic[ItemT]):
    """A candidate before it is simulated."""

    item: ItemT
    bounds_us: tuple[float, ...]
    """Least time on each machine; infinite where it cannot fit."""

    least_bytes: int = 0
    """Least memory."""

    guesses_us: tuple[float, ...]
    """Expected time on each machine."""

    guess_bytes: float = 0.0
    """Expected memory."""

    kinds: tuple[Hashable, ...] = (None,)
    """Groups whose results correct the guess, the most specific one first."""

    family: Hashable = None
    """Equal for candidates that are nearly the same."""


class Frontier(Generic[ItemT]):
    """The candidates that were not simulated, and the best result on each machine.

    Args:
        candidates: in an order that decides between equals.
        capacities: bytes of each machine's device.
    """

    def __init__(
        self, candidates: Iterable[BoundedCandidate[ItemT]], capacities: Sequence[float]
    ) -> None:
        self.candidates = list(candidates)
        self._capacities = capacities
        shape = (len(self.candidates), len(capacities))
        self._bounds = np.array([each.bounds_us for each in self.candidates]).reshape(shape)
        self._guesses = np.array([each.guesses_us for each in self.candidates]).reshape(shape)
        self._bytes = np.array([each.guess_bytes for each in self.candidates])
        numbers: dict[tuple[Hashable, ...], int] = {}
        kinds = [numbers.setdefault(each.kinds, len(numbers)) for each in self.candidates]
        self._kinds, self._kind_of = [*numbers], np.array(kinds, dtype=np.intp)
        families: dict[Hashable, int] = {}
        found = [families.setdefault(each.family, len(families)) for each in self.candidates]
        self._family_of = np.array(found)
        self._is_begun = np.zeros(len(self.candidates), dtype=np.bool_)
        self._seen: dict[Hashable, list[tuple[float, float]]] = {}
        self._has_fitting = [False] * len(capacities)
        self._best: list[tuple[float, int]] = [(math.inf, -1)] * len(capacities)
        self._is_open = np.ones(len(self.candidates), dtype=np.bool_)
        self._places: NDArray[np.float64] = np.zeros(0)
        self._queue: Iterator[int] | None = None

    @property
    def num_left(self) -> int:
        """Number of candidates that could still win."""
        return len(self._waiting())

    @property
    def num_cut(self) -> int:
        """Number of candidates that were not taken and cannot win any more."""
        return int(np.count_nonzero(self._is_open)) - self.num_left

    def best(self, machine: int = 0) -> tuple[float, ItemT] | None:
        """Return the least time on a machine and its candidate; None before one is found."""
        cost, number = self._best[machine] if self._best else (math.inf, -1)
        return (cost, self.candidates[number].item) if number >= 0 else None

    def expected(self, number: int) -> tuple[float, float]:
        """Return the corrected guesses of a candidate: time on the first machine, and bytes."""
        each = self.candidates[number]
        time, memory = self._correction(each.kinds)
        return each.guesses_us[0] * time, each.guess_bytes * memory

    def take(self) -> tuple[int, ItemT] | None:
        """Return the next candidate to simulate with its number; None if none could win."""
        if self._queue is None:
            self._queue = self._in_order()
        for number in self._queue:
            if self._is_open[number] and self._can_win(number):
                self._is_open[number] = False
                return number, self.candidates[number].item
        return None

    def begin(
        self, number: int, is_wanted: Callable[[ItemT], bool], *, within: float
    ) -> list[tuple[int, ItemT]]:
        """Begin one that was taken, and take others with it.

        Args:
            number: of the one that was taken.
            is_wanted: returns whether another item is simulated with it.
            within: the others' place in the order may be this many times that of the first.
        """
        self._is_begun |= self._family_of == self._family_of[number]
        self._queue = None
        near = self._waiting()
        near = near[self._places[near] <= within * self._places[number]]
        also = [other for other in near.tolist() if is_wanted(self.candidates[other].item)]
        self._is_open[also] = False
        return [(other, self.candidates[other].item) for other in also]

    def put_back(self, number: int) -> None:
        """Put back a candidate that was taken and not simulated."""
        self._is_open[number] = True

    def record(self, number: int, costs: Sequence[Cost]) -> None:
        """Record the result of a candidate that was taken, on each machine.

        Raises:
            WrongBoundError: a cost is less than its bound. Nothing is recorded then.
        """
        each = self.candidates[number]
        for (time, held), bound, capacity in zip(
            costs, each.bounds_us, self._capacities, strict=True
        ):
            if held < each.least_bytes:
                raise WrongBoundError(
                    f"{each.item} holds {held:,} bytes, and its bound is {each.least_bytes:,}"
                )
            if held <= capacity and time < bound * (1 - 1e-9):
                raise WrongBoundError(f"{each.item} costs {time:g}, and its bound is {bound:g}")
        for machine, (time, held) in enumerate(costs):
            if held <= self._capacities[machine]:
                self._has_fitting[machine] = True
                self._best[machine] = min(self._best[machine], (time, number))
        if each.guess_bytes:
            ratios = (costs[0][0] / each.guesses_us[0], costs[0][1] / each.guess_bytes)
            for kind in each.kinds:
                self._seen.setdefault(kind, []).append(ratios)
        self._queue = None

    def _in_order(self) -> Iterator[int]:
        """Return the candidates that could win, ordered by their corrected guesses."""
        known = [self._correction(kinds) for kinds in self._kinds]
        times, memory = np.array(known).reshape(-1, 2).T
        held = self._bytes * memory[self._kind_of]
        places = np.full(len(self.candidates), math.inf)
        for machine, capacity in enumerate(self._capacities):
            part = held / capacity
            sure = _SURE[self._has_fitting[machine]]
            within = 1 + 5 * np.maximum(0.0, part - sure)
            beyond = 2 * part + 5 * (_SURE[True] - sure)
            expected_us = self._guesses[:, machine] * times[self._kind_of]
            places = np.minimum(places, expected_us * np.where(part > 1, beyond, within))
        self._places = places * np.where(self._is_begun, _AGAIN, 1.0)
        waiting = self._waiting()
        return iter(waiting[np.argsort(self._places[waiting], kind="stable")].tolist())

    def _correction(self, kinds: Sequence[Hashable]) -> tuple[float, float]:
        """Return the mean ratios of results to guesses of the most specific kind that has any."""
        seen = next((self._seen[kind] for kind in kinds if kind in self._seen), [(1.0, 1.0)])
        return sum(time for time, _ in seen) / len(seen), sum(held for _, held in seen) / len(seen)

    def _can_win(self, number: int) -> bool:
        bounds = self.candidates[number].bounds_us
        return any((bound, number) < best for bound, best in zip(bounds, self._best, strict=True))

    def _waiting(self) -> NDArray[np.intp]:
        """Return the numbers of candidates that were not taken and can win, ascending."""
        numbers = np.arange(len(self.candidates))
        can_win = np.zeros(len(self.candidates), dtype=np.bool_)
        for bounds, (cost, number) in zip(self._bounds.T, self._best, strict=True):
            can_win |= (bounds < cost) | ((bounds == cost) & (numbers < number))
        return np.flatnonzero(self._is_open & can_win)


def search(frontier: Frontier[ItemT], simulate: Callable[[ItemT], Sequence[Cost] | None]) -> None:
    """Simulate candidates one after another until none is left that could win.

    Args:
        frontier: the candidates.
        simulate: returns the costs on each machine; None if it cannot be simulated.
    """
    while (taken := frontier.take()) is not None:
        number, item = taken
        costs = simulate(item)
        if costs is not None:
            frontier.record(number, costs)
