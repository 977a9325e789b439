"""Numbers of a graph that follow from the place of a rank on its mesh, and the proof that they do.

With tensor parallelism, each rank has another first row of its part of a vocabulary, and another
piece of a sequence: ``base + step * coordinate``. If two axes cut a tensor, the offset of a piece
in memory follows both: ``base + step * i + step * j``. Other functions are not looked for.

Proof: the places of some ranks decide every such function. Further ranks, as far away as the mesh
allows, confirm it. A number that is no such function has another value on one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateRule:
    """A number that follows from the place of a rank: ``base``, and a step for each axis."""

    base: int
    steps: Mapping[str, int]
    """How much one place further along an axis adds, by axis; none is 0."""

    def at(self, coordinates: Mapping[str, int]) -> int:
        """Return the number of a rank."""
        steps = self.steps.items()
        return self.base + sum(step * coordinates[axis] for axis, step in steps)


def encoded_rule(rule: CoordinateRule) -> list[Any]:
    """Return a value by coordinate, as a document has it: ``["by", base, axis, step, ...]``."""
    return ["by", rule.base, *(each for pair in rule.steps.items() for each in pair)]


def decoded_rule(item: Sequence[Any]) -> CoordinateRule:
    """Return the rule that a value by coordinate holds.

    Raises:
        ValueError: an axis has no step.
    """
    _, base, *steps = item
    return CoordinateRule(base=base, steps=dict(zip(steps[::2], steps[1::2], strict=True)))


def proving_ranks(places: Sequence[Mapping[str, int]]) -> list[int]:
    """Return the ranks whose captures prove rules for all ranks.

    On a mesh of 128 x 8 these are four: the first rank, its neighbor along each axis, and the last
    rank, which confirms what the three decide.

    Args:
        places: coordinates of every rank that the rules are for, by axis. All have the same axes.

    Returns:
        Positions in ``places``, in ascending order.
    """
    known = _Echelon()
    chosen = {n for n, place in enumerate(places) if known.add(_row(place, list(place)))}
    others = [n for n in range(len(places)) if n not in chosen]
    chosen.update(others[-1:])
    for axis in places[0]:
        # Two places decide a straight line, and only a third one on the same axis can refute it.
        met = {places[n][axis] for n in chosen}
        more = [n for n in others if places[n][axis] not in met]
        if len(met) < 3:
            chosen.update(more[-1:])
    return sorted(chosen)


def rule_of(points: Sequence[tuple[Mapping[str, int], int]]) -> CoordinateRule | None:
    """Return the rule that gives every one of these ranks its number; None if there is none.

    All rules that do so give all ranks the same numbers if the ranks of ``proving_ranks`` are among
    these. A rule of one axis is preferred.

    Args:
        points: coordinates of a rank, and its number.
    """
    axes = list(points[0][0])
    for some in (*([axis] for axis in axes), axes):
        equations = _Echelon()
        for place, value in points:
            equations.add([*_row(place, some), value])
        found = equations.solve(1 + len(some))
        if found is not None and all(each.denominator == 1 for each in found):
            base, *steps = map(int, found)
            named = zip(some, steps, strict=True)
            return CoordinateRule(base=base, steps={axis: step for axis, step in named if step})
    return None


def _row(place: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Return what the base and each step are multiplied by on a rank."""
    return [1, *(place[axis] for axis in axes)]


class _Echelon:
    """Linear equations in echelon form: each row is reduced by those before it."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[int]]] = []

    def add(self, row: Sequence[int]) -> bool:
        """Add a row. Return whether it is no linear combination of the rows before."""
        reduced = list(row)
        for pivot, known in self._rows:
            if reduced[pivot]:
                own, other = known[pivot], reduced[pivot]
                reduced = [own * a - other * b for a, b in zip(reduced, known, strict=True)]
        first = next((n for n, each in enumerate(reduced) if each), None)
        if first is None:
            return False
        self._rows.append((first, reduced))
        return True

    def solve(self, width: int) -> list[Fraction] | None:
        """Return an x with ``row[:width] . x == row[width]`` for all rows; None if none exists."""
        solution = [Fraction(0)] * width
        for pivot, row in sorted(self._rows, reverse=True):
            if pivot == width:
                return None
            products = (a * b for a, b in zip(row[:width], solution, strict=True))
            rest = sum(products, Fraction(0))
            solution[pivot] = (row[width] - rest) / row[pivot]
        return solution
