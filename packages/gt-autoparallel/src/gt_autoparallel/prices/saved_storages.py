"""Which memory the backward keeps alive, as far as it does not depend on what is chosen.

A forward value that the backward reads is saved. A view of a value, or its share node, is in the
value's own storage as long as both have one layout; moved to another layout it is a storage of its
own. So what a view-like node adds to the saved bytes depends on whether it *moved*, and on whether
the storage below it is counted anyway. What need not be kept may be computed again, from values
that are kept, or computed again themselves. Nodes whose bytes depend on that take one of these
statuses:

    idle        nobody needs its storage
    kept        needed, and kept since the forward: its bytes count. Of nodes that are no views
    moved       likewise, of a view-like node: what it views was moved, and that storage is kept
    aliased     needed, and in the storage of what it views, which must be needed too: nothing more
    recomputed  needed, and made again in the backward: what it is made of must be needed too

The backward of routed experts reads what their forward reads, and what autograd recorded of it. It
has a status for that:

    kept        since the forward
    products    of that what matrix products and exchanges made; the rest is made again from it
    repeated    it runs the forward once more, right before itself; nothing of it is kept

Of several results of one node, those that the backward does not read itself count for nobody while
the node is kept. So a view of one of them counts what it views, moved or not; and lies in it if the
node runs again.

A view of a part keeps the whole storage alive, and an expanded view no more than what it expands:
each counts as what it views. A view-like node in the layout of what it views is aliased where that
is offered, also if what it views is recomputed. Only statuses that make a difference are offered:
where nothing below is counted by anybody else, and views are as large as what they view, a storage
counts the same moved or aliased. It does not where it is asked which layer has it, and the view
is in another layer than what it views.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.prices.microbatches import (
    Microbatches,
    accumulated_gradients,
    gathered_parameters,
)
from gt_autoparallel.prices.recomputability import recomputable_nodes, repeatable_experts

Status = Literal["idle", "kept", "moved", "aliased", "recomputed", "products", "repeated"]

_OF_EXPERTS: tuple[Status, ...] = ("kept", "products", "repeated")

SOURCES = ("parameter", "buffer", "input")
"""Kinds of nodes whose storages are there anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorages:
    """What is saved of a graph."""

    values: frozenset[Value]
    """Made by a node that is no view: their bytes count, unless the node is idle or recomputed."""

    statuses: Mapping[int, tuple[Status, ...]]
    """The statuses that each node may take whose bytes depend on it. A view-like node whose only
    status is "moved" counts its bytes whatever it does."""

    num_live: int = 1
    """Microbatches of which all that is saved is there at one time."""

    num_graphs: int = 1
    """Graphs that take turns, of which each counts its part of what there is once."""

    gathered: frozenset[int] = frozenset()
    """Nodes of whose results there is one for all microbatches."""

    accumulated: Mapping[Value, int] | None = None
    """What is added up over microbatches, to bytes of an element; None: gradients are reduced."""

    def counts_while_kept(self, graph: PlacementGraph, value: Value) -> bool:
        """Whether the storage of a value is among the bytes of its node, unless it runs again."""
        node = graph.nodes[value.node]
        return is_view_like(node) or value in self.values or node.index not in self.statuses

    def num_copies(self, node: PlacementNode) -> int:
        """How often what is saved of a node is there."""
        return 1 if node.index in self.gathered else self.num_live

    def description(self, node: PlacementNode) -> tuple[object, ...]:
        """What two nodes must have in common to share a choice."""
        saved = tuple(
            Value(node.index, position) in self.values for position in range(len(node.outputs))
        )
        added_up = self.accumulated or {}
        sums = tuple(
            added_up.get(Value(node.index, position)) for position in range(len(node.outputs))
        )
        return (saved, self.statuses.get(node.index), node.index in self.gathered, sums)


def saved_storages(
    graph: PlacementGraph,
    *,
    recomputes: bool,
    microbatches: Microbatches | None = None,
    by_layer: bool = False,
) -> SavedStorages:
    """Find what the backward of ``graph`` keeps alive.

    ``recomputes`` says whether nodes of the forward may run again: of a graph that runs for several
    microbatches not those that gather parameters, which stay. ``by_layer`` asks also which layer
    has what is kept.
    """
    gathered = frozenset[int]() if microbatches is None else gathered_parameters(graph)
    nodes = graph.nodes
    read = {
        value
        for node in nodes
        if node.phase == "backward"
        for value in node.operands
        if nodes[value.node].phase == "forward" and nodes[value.node].kind not in SOURCES
    }
    makers = _Makers(graph, read, gathered) if recomputes else None
    views = {n.index: n.operands[0] for n in nodes if n.phase == "forward" and is_view_like(n)}
    read_nodes = {value.node for value in read}
    again: Collection[int] = () if makers is None else makers.recomputed
    wanted = read_nodes if makers is None else makers.wanted
    num_needy = dict.fromkeys(views, 0)
    needed: set[int] = set()
    for index in reversed(list(views)):
        if index in wanted or num_needy[index] > 0:
            needed.add(index)
            viewed = views[index].node
            if viewed in num_needy:
                num_needy[viewed] += 1
    # Whether somebody counts, or need not count, the storage that a node or value is in.
    counted: dict[int, bool] = {}
    statuses: dict[int, tuple[Status, ...]] = {} if makers is None else makers.statuses()
    lent = _lent(graph, needed, read) if by_layer and makers is None else set[int]()
    statuses |= dict.fromkeys(sorted(lent), ("idle", "kept"))
    if recomputes:
        statuses |= dict.fromkeys(repeatable_experts(graph).values(), _OF_EXPERTS)
    for index, source in views.items():
        if index not in needed:
            continue
        below = _is_counted_below(source, nodes, read, counted) or source.node in statuses
        is_read = index in read_nodes
        # Whoever counts here counts what is viewed: above, it would be another number of bytes.
        is_pivot = num_needy[index] > 1 or _resizes(nodes[index], graph)
        counted[index] = is_read or is_pivot or below
        if below:
            idle: tuple[Status, ...] = () if is_read else ("idle",)
            more: tuple[Status, ...] = ("recomputed",) if index in again else ()
            statuses[index] = (*idle, "moved", "aliased", *more)
        elif is_read:
            statuses[index] = ("moved",)
        elif is_pivot:
            statuses[index] = ("idle", "moved")
    counts = {value for value in read if value.node not in views}
    counts |= {Value(index) for index in lent} if makers is None else makers.values
    if microbatches is None:
        return SavedStorages(values=frozenset(counts), statuses=statuses)
    return SavedStorages(
        values=frozenset(counts),
        statuses=statuses,
        num_live=microbatches.num_live,
        num_graphs=microbatches.num_graphs,
        gathered=gathered,
        accumulated=accumulated_gradients(graph),
    )


class _Makers:
    """The nodes that may run again, and those that are no views and may be kept for them."""

    def __init__(
        self, graph: PlacementGraph, read: Collection[Value], stay: frozenset[int]
    ) -> None:
        self._nodes = graph.nodes
        self._read = read
        self._read_nodes = {value.node for value in read}
        self.recomputed = self._with_sources(recomputable_nodes(graph) - stay)
        """Nodes that may be recomputed: what they read can be there in the backward."""

        self.wanted = set(self._read_nodes)
        """Nodes of the forward that the backward reads, or what may be recomputed for it."""

        for node in reversed(graph.nodes):
            if node.phase == "forward" and node.index in self.wanted:
                if is_view_like(node):
                    self.wanted.add(node.operands[0].node)
                elif node.index in self.recomputed:
                    self.wanted.update(value.node for value in node.operands)
        self.wanted = {i for i in self.wanted if self._nodes[i].kind not in SOURCES}
        self._makers = [
            node
            for node in graph.nodes
            if node.index in self.wanted and not is_view_like(node) and node.phase == "forward"
        ]
        self.values = {Value(node.index) for node in self._makers if _has_one_output(node)}
        """What counts if it is kept, of nodes that have a single output."""

    def statuses(self) -> dict[int, tuple[Status, ...]]:
        """Of the nodes that are no views."""
        found: dict[int, tuple[Status, ...]] = {}
        for node in self._makers:
            is_read = node.index in self._read_nodes
            again: tuple[Status, ...] = ("recomputed",) if node.index in self.recomputed else ()
            if is_read and again:
                found[node.index] = ("kept", *again)
            elif not is_read and _has_one_output(node):
                found[node.index] = ("idle", "kept", *again)
        return found

    def _with_sources(self, candidates: Collection[int]) -> frozenset[int]:
        """Those of which every operand may be there in the backward."""
        there: set[int] = set()
        found: set[int] = set()
        for node in self._nodes:
            if node.phase == "backward":
                continue
            operands = node.operands[:1] if is_view_like(node) else node.operands
            has_all = all(self._may_be_there(value, there) for value in operands)
            if node.index in candidates and has_all:
                found.add(node.index)
            if is_view_like(node) and (has_all or node.index in self._read_nodes):
                there.add(node.index)
        return frozenset(found)

    def _may_be_there(self, value: Value, views: Collection[int]) -> bool:
        """An output that nobody reads later cannot be kept apart from its node's others."""
        node = self._nodes[value.node]
        if is_view_like(node):
            return node.index in views
        return node.kind in SOURCES or value in self._read or _has_one_output(node)


def _has_one_output(node: PlacementNode) -> bool:
    return len(node.outputs) == 1 and node.outputs[0] is not None


def _lent(graph: PlacementGraph, views: Collection[int], read: Collection[Value]) -> set[int]:
    """Nodes whose result a view in another layer keeps, and nobody reads later itself."""
    found: set[int] = set()
    for index in views:
        value = graph.nodes[index].operands[0]
        while is_view_like(graph.nodes[value.node]):
            value = graph.nodes[value.node].operands[0]
        maker = graph.nodes[value.node]
        crosses = layer_of_module(maker.module) != layer_of_module(graph.nodes[index].module)
        if crosses and maker.kind not in SOURCES and value not in read and _has_one_output(maker):
            found.add(value.node)
    return found


def _resizes(node: PlacementNode, graph: PlacementGraph) -> bool:
    """Whether a view is a part of what it views, or expands it."""
    viewed = math.prod(graph.spec(node.operands[0]).shape)
    return any(spec is not None and math.prod(spec.shape) != viewed for spec in node.outputs)


def _is_counted_below(
    source: Value,
    nodes: tuple[PlacementNode, ...],
    read: set[Value],
    counted: Mapping[int, bool],
) -> bool:
    if nodes[source.node].kind in SOURCES:
        return True
    return source in read or counted.get(source.node, False)
