"""Ranks that may run one captured graph, and the ranks whose captures prove it.

Ranks with equal fingerprints know nothing in which they differ. Two of them capture, at places far
apart on the mesh: the lowest and the highest. If their documents are equal, node by node, all run
the graph of the lowest.

Two captures cannot tell which axis a number follows. Where numbers are expected to differ, one more
rank captures for each axis, at the same time (``coordinate_rules``). This holds with tensor
parallelism, since ranks hold other rows of a vocabulary, and for placed models, since pieces of
buffers have other offsets in memory. Such a number becomes a value by coordinate.

If anything else differs, every rank captures for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gt_trace.artifacts.coordinate_rules import proving_ranks

Coordinates = Mapping[str, int]
"""The place of a rank: its position by mesh axis, from 0."""

TENSOR_AXIS = "tp"
"""The axis of tensor parallelism."""

PIPELINE_AXIS = "pp"
"""The axis along which ranks hold other parts of a model. Alike parts differ in names alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeRanks:
    """Ranks of which nothing is known in which their graphs differ."""

    coordinates: Mapping[int, Coordinates]
    """Places by rank. All ranks have the same axes."""

    is_placed: bool
    """Whether a solver placed the model."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in ascending order."""
        return tuple(sorted(self.coordinates))

    @property
    def witnesses(self) -> tuple[int, ...]:
        """The ranks that capture, the lowest first."""
        ranks = self.ranks
        places = [self.coordinates[rank] for rank in ranks]
        holds_numbers = self.is_placed or len({each.get(TENSOR_AXIS) for each in places}) > 1
        if holds_numbers:
            return tuple(ranks[position] for position in proving_ranks(places))
        return tuple(dict.fromkeys((ranks[0], ranks[-1])))

    def first_of_its_kind(self, rank: int, rule_axes: Sequence[str]) -> int:
        """Return the lowest rank that runs the very same graph as ``rank``, its names included.

        Args:
            rank: one of these.
            rule_axes: the axes from which numbers of the graph follow.
        """
        own = self.coordinates[rank]
        axes = [axis for axis in (*rule_axes, PIPELINE_AXIS) if axis in own]
        return next(
            each
            for each in self.ranks
            if all(self.coordinates[each][axis] == own[axis] for axis in axes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks of one fingerprint, and where their graphs come from."""

    ranks: tuple[int, ...]
    captured_by: tuple[int, ...]
    """The rank whose capture all run, and the ranks whose captures were compared with it. Without
    a shared graph, the ranks that captured their own. Empty if the graphs were stored before."""

    is_shared: bool = True
    """Whether all run one graph. Otherwise each runs its own."""

    num_rules: int = 0
    """How many numbers of the graph follow from the place of a rank."""

    rule_axes: tuple[str, ...] = ()
    """The axes from which they follow."""

    reason: str = ""
    """Why these ranks are apart from others, or from each other; "" without a reason."""

    part: str = ""
    """The part of the model that the graph is of, as "stage 1"; "" for the whole."""

    def __str__(self) -> str:
        """One line."""
        text = f"{ranks_text(self.ranks)}{f', {self.part}' if self.part else ''}: "
        first, *witnesses = self.captured_by or (None,)
        if not self.is_shared:
            text += "each has its own graph, captured "
            text += f"by {ranks_text(self.captured_by)}" if self.captured_by else "before"
        elif first is None:
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
    """Return how many groups there are, and each in a line."""
    heading = "1 group of ranks" if len(groups) == 1 else f"{len(groups)} groups of ranks"
    return "\n  ".join([heading, *map(str, groups)])


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in a few words: "ranks 0-6 by 2, 9"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(spans(sorted(ranks)))


def spans(ranks: Sequence[int]) -> Iterator[str]:
    """Yield spans of ascending numbers with equal steps: "0-6 by 2", "9"."""
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
