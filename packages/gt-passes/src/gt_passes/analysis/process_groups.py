"""What a process group is, apart from its name, so that graphs of several ranks can be compared.

Names cannot be: the groups of one mesh axis have one name each, and a rank only knows its own. What
the members of a group share, and what looks the same from every rank of a regular mesh, is the set
of ranks up to a shift (0, 8, 16, 24 and 3, 11, 19, 27 are both "4 ranks, 8 apart"), and how many
groups of the same ranks were made before it, since all members must make groups in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, torch_group_ordinal, torch_group_ranks
from gt_passes.analysis.node_calls import arguments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIdentity:
    """A process group as seen from a graph."""

    name: str
    """On this rank."""

    ranks: tuple[int, ...] | None
    """Global ranks, in the order of the group; None where this process has no such group."""

    ordinal: int = 0
    """How many groups of exactly these ranks this process made before."""

    def __str__(self) -> str:
        """What is the same for all groups of one mesh axis; the name where no ranks are known."""
        if self.ranks is None:
            return f"group {self.name!r}"
        offsets = [rank - self.ranks[0] for rank in self.ranks]
        step = offsets[1] if len(offsets) > 1 else 1
        if offsets == [index * step for index in range(len(offsets))]:
            text = f"{len(offsets)} ranks" + (f", {step} apart" if len(offsets) > 1 else "")
        else:
            text = f"{len(offsets)} ranks at +" + ", +".join(map(str, offsets))
        return text + (f", group {self.ordinal + 1} of these" if self.ordinal else "")


def group_identity(name: str) -> GroupIdentity:
    """The process group of that name in this process."""
    ranks = torch_group_ranks(name)
    ordinal = 0 if ranks is None else torch_group_ordinal(name)
    return GroupIdentity(name=name, ranks=ranks, ordinal=ordinal)


def place_in_group(name: str) -> int | None:
    """Which of a group's ranks this process is; None where it is none, or has no such group."""
    ranks = group_identity(name).ranks
    if ranks is None or not dist.is_initialized() or dist.get_rank() not in ranks:
        return None
    return ranks.index(dist.get_rank())


def are_axes_of_one_mesh(first: str, second: str) -> bool:
    """Whether two groups are axes of one mesh, or of axes flattened, one perhaps part of another.

    One rank sees only its own groups: every rank must have groups that look the same, as ranks do
    whose sequences of collectives agree. Of n ranks, k apart, there is then one way to cut a world.
    """
    one, other = _progression(first), _progression(second)
    if one is None or other is None:
        return False
    # The finer one first, and of equally fine ones the longer.
    (step, end), (other_step, other_end) = sorted(
        (one, other), key=lambda each: (each[0], -each[1])
    )
    is_outside = other_step % end == 0
    is_part = other_step % step == 0 and end % other_end == 0
    return is_outside or is_part


def _progression(name: str) -> tuple[int, int] | None:
    """How far apart the ranks of a group are, and how far those behind its end."""
    ranks = group_identity(name).ranks
    if ranks is None:
        return None
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step < 1 or ranks != tuple(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return None
    return step, step * len(ranks)


def group_name_of(node: Node) -> str | None:
    """The name of the process group that an operator is given; None for an operator without one."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    value = arguments_of(node).get("group_name")
    # A string, or since torch 2.15 possibly the group itself.
    name = value if isinstance(value, str) else getattr(value, "group_name", None)
    return name if isinstance(name, str) else None
