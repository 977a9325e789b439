"""What must stay in order when the nodes of a stretch of a graph are put in another one.

Besides arguments, five things bind: operators of unknown effect, memory that is written to, random
draws, what a collective in flight reads, and the host's reading of device memory. All bonds point
from earlier to later nodes, so that the original order is one of those allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import ChunkAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.analysis.collectives import is_collective, is_declared_launch, waits_of
from gt_passes.analysis.graph_scan import GraphScan, GraphScanner
from gt_passes.analysis.host_copies import starts_host_copy, waits_for_copy
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.written_memory import Memory, memories_written
from gt_trace.node_metadata import read_annotation


class OrderConstraints:
    """The bonds of a graph as it was when this was built. Linear in its size."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._scan = GraphScanner().scan(graph_module)
        self._earlier: dict[Node, list[Node]] = {}
        self._barriers = frozenset(self._scan.barriers)
        for memory in memories_written(self._scan):
            self._bind_memory(memory)
        self._bind_chain(self._scan.random)
        self._bind_host_reads(graph_module.graph)

    @property
    def position(self) -> dict[Node, int]:
        """Where each node stands in the original order."""
        return self._scan.position

    def predecessors(self, nodes: Sequence[Node]) -> list[tuple[int, ...]]:
        """The indices of those that must come before it among ``nodes``, for each of them.

        Args:
            nodes: a stretch of the graph without a gap, in the original order.
        """
        index = {node: i for i, node in enumerate(nodes)}
        found: list[tuple[int, ...]] = []
        last_barrier: int | None = None
        for i, node in enumerate(nodes):
            before = {index[each]: None for each in self.earlier(node) if each in index}
            if last_barrier is not None:
                before[last_barrier] = None
            if node in self._barriers:
                before.update(dict.fromkeys(range(last_barrier or 0, i)))
                last_barrier = i
            found.append(tuple(sorted(before)))
        return found

    def earlier(self, node: Node) -> Iterator[Node]:
        """What must come before one node, barriers aside. With repetitions."""
        yield from node.all_input_nodes
        yield from self._earlier.get(node, ())

    def _bind(self, earlier: Node, later: Node) -> None:
        if earlier is not later:
            self._earlier.setdefault(later, []).append(earlier)

    def _bind_chain(self, nodes: Sequence[Node]) -> None:
        for earlier, later in itertools.pairwise(nodes):
            self._bind(earlier, later)

    def _bind_memory(self, memory: Memory) -> None:
        """Whatever touches the memory stays on its side of every write."""
        writers = set(memory.writers)
        last_writer: Node | None = None
        touched_since: list[Node] = []
        for node in _touching(memory, self._scan):
            if last_writer is not None:
                self._bind(last_writer, node)
            if node in writers:
                for earlier in touched_since:
                    self._bind(earlier, node)
                last_writer, touched_since = node, []
            else:
                touched_since.append(node)

    def _bind_host_reads(self, graph: Graph) -> None:
        """The host reads in its order, and what is copied to it only once the copy is done.

        A copy that does not block is done when a later operation has blocked; no argument says so.
        """
        last_of_lane: dict[object, Node] = {}
        unfinished: list[Node] = []
        for node in graph.nodes:
            if not is_host_read(node):
                continue
            annotation = read_annotation(node, ChunkAnnotation)
            lane = annotation and (annotation.region_root, annotation.chunk_id)
            if lane in last_of_lane:
                self._bind(last_of_lane[lane], node)
            last_of_lane[lane] = node
            if node.kwargs.get("non_blocking", False):
                unfinished.append(node)
                continue
            if _reads_device(node):
                for copy in unfinished:
                    for reader in _readers_behind_views(copy):
                        if self.position[reader] > self.position[node]:
                            self._bind(node, reader)
                unfinished = []


def is_host_read(node: Node) -> bool:
    """Whether the host waits for a number from a tensor, or tensors are copied to its memory."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten._local_scalar_dense.default:
        return True
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and _reads_device(node)


def _reads_device(node: Node) -> bool:
    values = map(value_of, node.all_input_nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values)


def _readers_behind_views(node: Node) -> Iterator[Node]:
    pending = list(node.users)
    while pending:
        user = pending.pop()
        yield user
        if is_only_a_view(user):
            pending.extend(user.users)


def _touching(memory: Memory, scan: GraphScan) -> list[Node]:
    """Everything that reads, writes or views the memory, also while in flight, in order."""
    found = dict.fromkeys((*memory.members, *memory.writers))
    for member in memory.members:
        for user in member.users:
            found[user] = None
            if is_collective(user) or is_declared_launch(user):  # the network reads until the wait
                found.update(dict.fromkeys(waits_of(user)))
            elif starts_host_copy(user):
                found.update(dict.fromkeys(waits_for_copy(user)))
    return sorted(found, key=scan.position.__getitem__)
