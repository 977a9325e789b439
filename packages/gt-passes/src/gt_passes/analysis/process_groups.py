"""What a process group is, apart from its name, so that graphs of several ranks can be compared.

Names cannot be: the groups of one mesh axis have one name each, and a rank only knows its own. What
the members of a group share, and what looks the same from every rank of a regular mesh, is the set
of ranks up to a shift (0, 8, 16, 24 and 3, 11, 19, 27 are both "4 ranks, 8 apart"), and how many
groups of the same ranks were made before it, since all members must make groups in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def group_name_of(node: Node) -> str | None:
    """The name of the process group that an operator is given; None for an operator without one."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    value = arguments_of(node).get("group_name")
    # A string, or since torch 2.15 possibly the group itself.
    name = value if isinstance(value, str) else getattr(value, "group_name", None)
    return name if isinstance(name, str) else None
