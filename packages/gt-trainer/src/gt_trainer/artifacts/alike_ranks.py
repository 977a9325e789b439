"""Which ranks can run one captured graph: found by comparing captures, and not assumed.

Ranks with equal fingerprints know nothing in which they differ. What their graphs depend on besides
is found so: of each such class the lowest rank captures, and beside it a witness, the highest,
which stands elsewhere on the mesh. If the two documents are equal, node by node, the class has one
graph. If not, more witnesses capture, which tell the axes apart: a number that follows one
coordinate in a straight line becomes a value by coordinate. If numbers are left, still more
capture, which tell what follows several coordinates at once. Anything else divides the class along
the axes that explain it. Each part is then a class of its own, with witnesses of its own.

Everything here is a function of where ranks stand and of documents, the same on every rank: who
captures next needs no word between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gt_trace.artifacts.coordinate_rules import (
    CoordinateRule,
    telling_ranks,
    telling_ranks_of_sums,
)
from gt_trace.artifacts.rank_differences import (
    Path,
    RankDifference,
    document_differences,
    rules_of,
)

Coordinates = Mapping[str, int]
"""Where a rank stands: its position by mesh axis, from 0."""


TENSOR_AXIS = "tp"
"""The axis of tensor parallelism."""

NUM_ROUNDS = 3
"""How many times more witnesses may be asked for, the first included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeRanks:
    """Ranks of which nothing is known in which their graphs differ."""

    coordinates: Mapping[int, Coordinates]
    """By rank; of one mesh, so that all have the same axes."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(sorted(self.coordinates))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which these ranks stand at different places.

        Of axes that tell the same ranks apart in the same way (expert parallelism borrows the ranks
        of others) the first alone.
        """
        places: dict[tuple[int, ...], str] = {}
        for axis in self.coordinates[self.ranks[0]]:
            column = tuple(self.coordinates[rank][axis] for rank in self.ranks)
            if len(set(column)) > 1:
                places.setdefault(column, axis)
        return tuple(places.values())

    @property
    def first_round(self) -> int:
        """The round with which to begin.

        Ranks of tensor parallelism hold other rows of a vocabulary and other pieces of a sequence,
        so that numbers will differ: those who would be asked next capture at once. That proves no
        less, and nobody waits for two captures in a row.
        """
        return 1 if TENSOR_AXIS in self.axes else 0

    def witnesses(self, round_number: int) -> tuple[int, ...]:
        """Ranks that have captured after a round, the lowest first; those of rounds before too.

        In the first round of ``NUM_ROUNDS`` the lowest rank and the highest, which stands elsewhere
        on most axes; in the second ranks whose captures leave no doubt on which axis a number
        depends; in the third, on which axes.
        """
        ranks = self.ranks
        places = [self.coordinates[rank] for rank in ranks]
        telling = telling_ranks_of_sums if round_number == 2 else telling_ranks
        found = tuple(ranks[position] for position in telling(places))
        return found[:2] if round_number == 0 else found

    def divided(self, axes: Sequence[str]) -> tuple[AlikeRanks, ...]:
        """The ranks by their places on some axes, in the order of the lowest rank of each."""
        parts: dict[tuple[int, ...], dict[int, Coordinates]] = {}
        for rank in self.ranks:
            place = tuple(self.coordinates[rank][axis] for axis in axes)
            parts.setdefault(place, {})[rank] = self.coordinates[rank]
        return tuple(AlikeRanks(coordinates=part) for part in parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What captures of ranks that seemed alike say."""

    rules: Mapping[Path, CoordinateRule] = field(default_factory=lambda: MappingProxyType({}))
    """Numbers that follow from a rank's place, by where they stand in the document."""

    divided_by: tuple[str, ...] = ()
    """Axes by which the ranks must be divided, since their graphs differ along them otherwise."""

    examples: tuple[RankDifference, ...] = ()
    """Differences that follow no rule, a few of them."""

    needs_more: bool = False
    """Whether nothing can be said before the witnesses of the next round have captured."""

    @property
    def rule_axes(self) -> list[str]:
        """The axes from which numbers follow, in alphabetical order."""
        return sorted({axis for rule in self.rules.values() for axis in rule.steps})


_MOST_EXAMPLES = 3


def judge(alike: AlikeRanks, captures: Mapping[int, Any], *, round_number: int) -> Judgement:
    """Compare documents of some of the ranks.

    Args:
        alike: the ranks.
        captures: documents by rank; that of the lowest rank is what others are compared with.
        round_number: of ``AlikeRanks.witnesses``, the last who all have captured; from 0.
    """
    origin = alike.ranks[0]
    others = [rank for rank in sorted(captures) if rank != origin]
    if not any(document_differences(captures[origin], captures[rank]) for rank in others):
        return Judgement()
    if round_number == 0:
        return Judgement(needs_more=True)
    compared = [(alike.coordinates[rank], captures[rank]) for rank in (origin, *others)]
    rules, unruled = rules_of(compared, [alike.coordinates[rank] for rank in alike.ranks])
    if not unruled:
        return Judgement(rules=rules)
    is_last = round_number == NUM_ROUNDS - 1
    if not is_last and any(difference.is_number for difference in unruled):
        return Judgement(needs_more=True)
    return Judgement(
        divided_by=_explaining_axes(alike, captures, rules),
        examples=tuple(unruled[:_MOST_EXAMPLES]),
    )


def _explaining_axes(
    alike: AlikeRanks, captures: Mapping[int, Any], rules: Mapping[Path, CoordinateRule]
) -> tuple[str, ...]:
    """The fewest axes such that captures at equal places on these differ by rules alone."""
    unlike = [
        pair
        for pair in itertools.combinations(sorted(captures), 2)
        if any(
            difference.path not in rules
            for difference in document_differences(*(captures[rank] for rank in pair))
        )
    ]
    for count in range(1, len(alike.axes) + 1):
        for axes in itertools.combinations(alike.axes, count):
            if all(
                any(alike.coordinates[a][axis] != alike.coordinates[b][axis] for axis in axes)
                for a, b in unlike
            ):
                return axes
    return alike.axes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that run one graph, and how that was found."""

    ranks: tuple[int, ...]
    captured_by: tuple[int, ...]
    """The rank whose capture they run, and those whose captures were compared with it; none of a
    graph that was there already."""

    num_rules: int = 0
    """How many numbers of the graph follow from a rank's place."""

    rule_axes: tuple[str, ...] = ()
    """The axes from which they follow."""

    reason: str = ""
    """Why these ranks and no others; "" where there is one group."""

    part: str = ""
    """Of which part of the model the graph is, as "stage 1"; "" of the whole."""

    def __str__(self) -> str:
        """One line."""
        text = f"{ranks_text(self.ranks)}{f', {self.part}' if self.part else ''}: "
        first, *witnesses = self.captured_by or (None,)
        if first is None:
            text += "captured before"
        elif witnesses:
            text += f"captured by {first}, compared with {ranks_text(witnesses)}"
        else:
            text += f"captured by {first}"
        if self.num_rules:
            axes = " and ".join(self.rule_axes)
            text += f"; {self.num_rules} numbers follow from the place along {axes}"
        return text + (f"; apart because {self.reason}" if self.reason else "")


def groups_text(groups: Sequence[RankGroup]) -> str:
    """How many groups there are, and each in a line."""
    heading = "1 group of ranks" if len(groups) == 1 else f"{len(groups)} groups of ranks"
    return "\n  ".join([heading, *map(str, groups)])


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a few words: "ranks 0-6 by 2, 9"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(spans(sorted(ranks)))


def spans(ranks: Sequence[int]) -> Iterator[str]:
    """Numbers in ascending order, those with equal steps as one text: "0-6 by 2", "9"."""
    start = 0
    while start < len(ranks):
        end = start + 1
        step = ranks[end] - ranks[start] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - start < 3:  # two ranks are no row
            end = start + (2 if end - start == 2 and step == 1 else 1)
            yield str(ranks[start]) if end - start == 1 else f"{ranks[start]}-{ranks[end - 1]}"
        else:
            by = "" if step == 1 else f" by {step}"
            yield f"{ranks[start]}-{ranks[end - 1]}{by}"
        start = end
