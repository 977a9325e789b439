"""What a node that launches a collective does: its kind, its bytes, its process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, torch_group_ranks
from gt_passes.analysis.process_groups import group_name_of
from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.errors import GtPassesError
from gt_passes.simulation.collective_model import CollectiveKind
from gt_passes.simulation.operands import input_operands, output_operands

RanksOfGroup = Callable[[str], Sequence[int]]
"""From the name of a process group to its global ranks."""

_KINDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("isend", "send_receive"),
    ("irecv", "send_receive"),
    ("batch_p2p", "send_receive"),
)


class UnknownProcessGroupError(GtPassesError, ValueError):
    """A graph names a process group whose ranks nobody told."""


class UnknownCollectiveError(GtPassesError, ValueError):
    """A collective of which neither kind nor process group can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLaunch:
    """One collective of a graph."""

    kind: CollectiveKind
    num_bytes: int
    """On this rank: the larger of what goes in and what comes out."""

    group_name: str


def collective_launch(node: Node, sizes: SymbolSizes) -> CollectiveLaunch:
    """What a node launches.

    Args:
        node: one for which ``gt_passes.analysis.collectives.is_collective`` holds.
        sizes: numbers for symbolic sizes.

    Raises:
        UnknownCollectiveError: neither kind nor group can be told.
    """
    assert isinstance(node.target, OpOverload)  # is_collective has looked
    name = node.target._schema.name.partition("::")[2]
    kinds = [kind for part, kind in _KINDS if part in name]
    group_name = group_name_of(node)
    if not kinds or group_name is None:
        raise UnknownCollectiveError(
            f"node {node.name} ({node.target}) is a collective of an unknown kind; known: "
            + ", ".join(part for part, _ in _KINDS)
        )
    given = sum(operand.num_bytes for operand in input_operands(node, sizes))
    taken = sum(operand.num_bytes for operand in output_operands(node, sizes))
    if "_out" in name:  # the result is an argument as well
        given -= taken
    kind = "send_receive" if _is_permutation(node) else kinds[0]
    return CollectiveLaunch(kind=kind, num_bytes=max(given, taken), group_name=group_name)


def _is_permutation(node: Node) -> bool:
    """Whether an all-to-all has one part: each rank sends to one other, as around a ring."""
    if node.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return False
    return all(_num_parts(splits) == 1 for splits in node.args[1:3])


def _num_parts(splits: object) -> int | None:
    """How many of the sizes are not 0; None if one is known at run time only."""
    if not isinstance(splits, list | tuple) or not all(isinstance(n, int) for n in splits):
        return None
    return len([size for size in splits if size != 0])


def ranks_of_torch_group(group_name: str) -> tuple[int, ...]:
    """The global ranks of a process group of this process, by torch's own registry.

    Raises:
        UnknownProcessGroupError: there is no such group here.
    """
    ranks = torch_group_ranks(group_name)
    if ranks is None:
        raise UnknownProcessGroupError(
            f"the graph uses the process group {group_name!r}, which this process does not have: "
            "simulate where the graph was captured, or say CostModel(ranks_of_group=...)"
        )
    return ranks
