"""The memory of a graph that is written to: who shares it, and who writes it in which order.

The alias classes of ``aliasing``, found only where something is written. A captured step writes to
few of its values, so this costs as much as those do, not as much as the graph.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from gt_passes.analysis.aliasing import shared_nodes, written_nodes
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.operator_effects import is_only_a_view, reads_only_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteInterval:
    """Consecutive writes to one memory. Interior ones are judged at their own writers."""

    num_writes: int
    first: Node
    last: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One alias class that some node writes to."""

    members: tuple[Node, ...]
    """Every node that may share the memory, in execution order."""

    writers: tuple[Node, ...]
    """Every node that may write to it, in execution order."""

    writer_positions: tuple[int, ...]

    def writes_between(self, begin: int, end: int) -> WriteInterval | None:
        """The writes at positions after ``begin`` and before ``end``; None for none."""
        low = bisect_right(self.writer_positions, begin)
        high = bisect_left(self.writer_positions, end)
        if low >= high:
            return None
        return WriteInterval(
            num_writes=high - low, first=self.writers[low], last=self.writers[high - 1]
        )


def memories_written(scan: GraphScan) -> Iterator[Memory]:
    """Every memory of a graph that is written to, by its first writer."""
    written_by = {writer: tuple(written_nodes(writer)) for writer in scan.writers}
    writers_of: dict[Node, list[Node]] = {}
    for writer, arguments in written_by.items():
        for argument in arguments:
            writers_of.setdefault(argument, []).append(writer)
    seen: set[Node] = set()
    for seed in writers_of:
        if seed in seen:
            continue
        members = _alias_class(seed)
        seen.update(members)
        writers = {writer for member in members for writer in writers_of.get(member, ())}
        ordered = tuple(sorted(writers, key=scan.position.__getitem__))
        yield Memory(
            members=tuple(sorted(members, key=scan.position.__getitem__)),
            writers=ordered,
            writer_positions=tuple(scan.position[writer] for writer in ordered),
        )


def data_readers(member: Node) -> Iterator[Node]:
    """The users of a node that look at its data, in the order in which they were made."""
    for user in member.users:
        if not is_only_a_view(user) and not is_wait(user) and not reads_only_metadata(user):
            yield user


def origin_of(node: Node) -> Node:
    """The node that made the value of which ``node`` is a view: views and waits traced back."""
    while is_only_a_view(node) or is_wait(node):
        sources = node.all_input_nodes
        if not sources:
            break
        node = sources[0]
    return node


def _alias_class(seed: Node) -> list[Node]:
    """All nodes that may share memory with one. A list, and in a fixed order."""
    members = {seed: None}
    pending = [seed]
    while pending:
        node = pending.pop()
        neighbours = list(shared_nodes(node))
        neighbours += [user for user in node.users if any(node is n for n in shared_nodes(user))]
        for neighbour in neighbours:
            if neighbour not in members:
                members[neighbour] = None
                pending.append(neighbour)
    return list(members)
