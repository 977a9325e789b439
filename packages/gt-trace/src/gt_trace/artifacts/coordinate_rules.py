"""Numbers of a graph that follow where a rank stands, and which captures prove it.

With tensor parallelism the first row of a part of a vocabulary is one, or which piece of a sequence
is this rank's: ``base + step * coordinate`` of one axis. Of a tensor that two axes cut, the place
of a piece in memory follows both. Other functions are not looked for; that a number follows none of
them is found, if ranks capture at the right places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateRule:
    """A number that follows from where a rank stands: ``base``, and for each axis a step."""

    base: int
    steps: Mapping[str, int]
    """How much one place further along an axis adds, by axis; none is 0."""

    def at(self, coordinates: Mapping[str, int]) -> int:
        """The number of a rank."""
        steps = self.steps.items()
        return self.base + sum(step * coordinates[axis] for axis, step in steps)


def encoded_rule(rule: CoordinateRule) -> list[Any]:
    """A value by coordinate, as a document has it: ``["by", base, axis, step, ...]``."""
    return ["by", rule.base, *(each for pair in rule.steps.items() for each in pair)]


def decoded_rule(item: Sequence[Any]) -> CoordinateRule:
    """The rule that a value by coordinate holds.

    Raises:
        ValueError: it has an axis without a step.
    """
    _, base, *steps = item
    return CoordinateRule(base=base, steps=dict(zip(steps[::2], steps[1::2], strict=True)))


def telling_ranks(places: Sequence[Mapping[str, int]]) -> list[int]:
    """Ranks whose captures leave no doubt about what a graph depends on, the fewest first.

    The first and the last; of an axis of more than two ranks also one between, so that what is no
    straight line is found out; and, where these do not tell two axes apart, ranks that do.

    Args:
        places: coordinates of every rank that is to be like the others, by axis; alike in which
            axes there are.

    Returns:
        Positions in ``places``, the first rank's first.
    """
    chosen = list(dict.fromkeys((0, len(places) - 1)))
    axes = list(places[0])

    def add_first(is_wanted: Callable[[Mapping[str, int]], bool]) -> None:
        position = next((n for n, place in enumerate(places) if is_wanted(place)), None)
        if position is not None and position not in chosen:
            chosen.append(position)

    for axis in axes:
        known = {places[position][axis] for position in chosen}
        if len(known) < 3:
            add_first(lambda place, axis=axis, known=known: place[axis] not in known)  # type: ignore[misc]  # mypy does not take defaults of a lambda
    for one, other in itertools.permutations(axes, 2):
        points = [(places[position], places[position][other]) for position in chosen]
        line = _rule(one, points)
        if line is not None:  # so far the one axis gives the other
            add_first(lambda place, line=line, other=other: line.at(place) != place[other])  # type: ignore[misc]  # likewise
    return chosen


def telling_ranks_of_sums(places: Sequence[Mapping[str, int]]) -> list[int]:
    """Ranks whose captures tell also what follows several coordinates at once.

    Those of ``telling_ranks``, and as many as decide every function of places with squares and
    products of two coordinates: of two axes, one rank at each corner of a rectangle.

    Args:
        places: as for ``telling_ranks``.
    """
    chosen = telling_ranks(places)
    rows = _QuadraticRows(places)
    known = _Echelon()
    for position in chosen:
        known.add(rows.of(places[position]))
    for position, place in enumerate(places):
        if known.add(rows.of(place)):
            chosen.append(position)
    return chosen


def only_rule_of_an_axis(
    points: Sequence[tuple[Mapping[str, int], int]], places: Sequence[Mapping[str, int]]
) -> CoordinateRule | None:
    """The rule of which no other gives any rank another number."""
    axes = list(points[0][0])
    found = [rule for axis in axes if (rule := _rule(axis, points)) is not None]
    if not found or any(len({rule.at(place) for rule in found}) > 1 for place in places):
        return None
    return found[0]


class SumFinder:
    """Rules of several axes, if the captures are of ranks that tell what follows several."""

    def __init__(
        self, captured: Sequence[Mapping[str, int]], places: Sequence[Mapping[str, int]]
    ) -> None:
        rows = _QuadraticRows(places)
        self._axes = rows.axes
        self._captured = [rows.of(place) for place in captured]
        self._all = map(rows.of, places)
        self._are_told_apart: bool | None = None

    def rule(self, values: Sequence[int]) -> CoordinateRule | None:
        """The rule by which captured ranks have these numbers; None if none is proven."""
        if self._are_told_apart is None:
            known = _Echelon()
            for row in self._captured:
                known.add(row)
            self._are_told_apart = not any(map(known.add, self._all))
        if not self._are_told_apart:
            return None
        width = 1 + len(self._axes)
        equations = _Echelon()
        for row, value in zip(self._captured, values, strict=True):
            equations.add([*row[:width], Fraction(value)])
        found = equations.solve(width)
        if found is None or any(each.denominator != 1 for each in found):
            return None
        base, *steps = map(int, found)
        named = zip(self._axes, steps, strict=True)
        return CoordinateRule(base=base, steps={axis: step for axis, step in named if step})


def _rule(axis: str, points: Sequence[tuple[Mapping[str, int], int]]) -> CoordinateRule | None:
    """The straight line through all points along an axis; None if there is none, or it is level."""
    by_coordinate: dict[int, int] = {}
    for coordinates, value in points:
        if by_coordinate.setdefault(coordinates[axis], value) != value:
            return None  # so that another axis matters
    if len(by_coordinate) < 2:
        return None
    (c0, v0), (c1, v1), *_ = sorted(by_coordinate.items())
    step, rest = divmod(v1 - v0, c1 - c0)
    if rest or any(v0 + step * (c - c0) != v for c, v in by_coordinate.items()):
        return None
    return CoordinateRule(base=v0 - step * c0, steps={axis: step})


class _QuadraticRows:
    """1, coordinates, their squares and products, of axes along which some ranks differ."""

    def __init__(self, places: Sequence[Mapping[str, int]]) -> None:
        self.axes = [axis for axis in places[0] if len({place[axis] for place in places}) > 1]

    def of(self, place: Mapping[str, int]) -> list[Fraction]:
        """Of one rank, those of first order in front."""
        at = [place[axis] for axis in self.axes]
        pairs = itertools.combinations_with_replacement(at, 2)
        return [Fraction(each) for each in (1, *at, *(a * b for a, b in pairs))]


class _Echelon:
    """Rows of numbers, each reduced by those before: tells what is a sum of multiples of them."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[Fraction]]] = []

    def add(self, row: Sequence[Fraction]) -> bool:
        """Whether a row is no such sum; it is known from then on."""
        reduced = list(row)
        for pivot, known in self._rows:
            if reduced[pivot]:
                factor = reduced[pivot] / known[pivot]
                reduced = [a - factor * b for a, b in zip(reduced, known, strict=True)]
        first = next((n for n, each in enumerate(reduced) if each), None)
        if first is None:
            return False
        self._rows.append((first, reduced))
        return True

    def solve(self, width: int) -> list[Fraction] | None:
        """The x with ``row[:width] . x == row[width]`` for all rows; None if there is none."""
        solution = [Fraction(0)] * width
        for pivot, row in sorted(self._rows, reverse=True):
            if pivot == width:
                return None
            rest = sum(a * b for a, b in zip(row[:width], solution, strict=True))
            solution[pivot] = (row[width] - rest) / row[pivot]
        return solution
