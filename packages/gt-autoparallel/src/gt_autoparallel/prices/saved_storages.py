"""Which memory the backward keeps alive, as far as it does not depend on the choice of layouts.

A forward value that the backward reads is saved. A view of a value, or its share node, is in the
value's own storage as long as both have one layout; moved to another layout it is a storage of its
own. So what a view-like node adds to the saved bytes depends on whether it *moved*, and on whether
the storage below it is counted anyway. Each view-like node on the way to something saved takes one
of these statuses:

    idle     nobody needs its storage
    moved    needed, and a storage of its own: its bytes count here
    aliased  needed, and the storage of what it views, which must be needed too: nothing counts here

A view of a part keeps the whole storage alive, and an expanded view no more than what it expands:
each counts as what it views. Only statuses that make a difference are offered: where nothing below
is counted by anybody else, and views are as large as what they view, a storage counts the same
moved or aliased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gt_autoparallel._torch_internals import OpOverload, views_first_argument
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value

Status = Literal["idle", "moved", "aliased"]

_SOURCES = ("parameter", "buffer", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorages:
    """What is saved of a graph."""

    values: frozenset[Value]
    """Read by the backward, and made by a node that is no view: their bytes count."""

    statuses: Mapping[int, tuple[Status, ...]]
    """The statuses that each view-like node on the way to something saved may take. One whose only
    status is "moved" counts its bytes whatever it does."""

    def description(self, node: PlacementNode) -> tuple[object, ...]:
        """What two nodes must have in common to share a choice."""
        saved = tuple(
            Value(node.index, position) in self.values for position in range(len(node.outputs))
        )
        return (saved, self.statuses.get(node.index))


def is_view_like(node: PlacementNode) -> bool:
    """Whether a node's results are in the storage of its first operand, if the layout stays."""
    if node.kind == "share":
        return True
    return (
        node.kind == "operator"
        and isinstance(node.target, OpOverload)
        and views_first_argument(node.target)
    )


def saved_storages(graph: PlacementGraph) -> SavedStorages:
    """Find what the backward of ``graph`` keeps alive."""
    nodes = graph.nodes
    read = {
        value
        for node in nodes
        if node.phase == "backward"
        for value in node.operands
        if nodes[value.node].phase == "forward" and nodes[value.node].kind not in _SOURCES
    }
    read_nodes = {value.node for value in read}
    views = {n.index: n.operands[0] for n in nodes if n.phase == "forward" and is_view_like(n)}
    num_needy = dict.fromkeys(views, 0)
    needed: set[int] = set()
    for index in reversed(list(views)):
        if index in read_nodes or num_needy[index] > 0:
            needed.add(index)
            viewed = views[index].node
            if viewed in num_needy:
                num_needy[viewed] += 1
    # Whether somebody counts, or need not count, the storage that a node or value is in.
    counted: dict[int, bool] = {}
    statuses: dict[int, tuple[Status, ...]] = {}
    for index, source in views.items():
        if index not in needed:
            continue
        below = _is_counted_below(source, nodes, read, counted)
        is_read = index in read_nodes
        # Whoever counts here counts what is viewed: above, it would be another number of bytes.
        is_pivot = num_needy[index] > 1 or _resizes(nodes[index], graph)
        counted[index] = is_read or is_pivot or below
        if is_read:
            statuses[index] = ("moved", "aliased") if below else ("moved",)
        elif below:
            statuses[index] = ("idle", "moved", "aliased")
        elif is_pivot:
            statuses[index] = ("idle", "moved")
    return SavedStorages(
        values=frozenset(value for value in read if value.node not in views), statuses=statuses
    )


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
    if nodes[source.node].kind in _SOURCES:
        return True
    return source in read or counted.get(source.node, False)
