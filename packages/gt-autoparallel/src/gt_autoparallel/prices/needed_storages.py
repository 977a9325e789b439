"""Where what a plan's backward needs of the forward lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, Value
from gt_autoparallel.prices.saved_storages import SOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededStorages:
    """Where what is needed of the forward in the backward lies; nothing of what runs again."""

    kept: Mapping[int, tuple[int, ...]]
    """Nodes with a storage of their own that is kept -> their outputs that are needed. Of view-like
    nodes it is what they view, moved."""

    aliased: frozenset[int]
    """View-like nodes that are needed, and lie in what they view."""

    recomputed: tuple[int, ...]
    """Nodes that run again, and not for nobody, in order. Of routed experts what their backward
    reads besides their operands; their result is kept if it is needed. A backward of routed experts
    among them makes again what lies between the products of its forward."""

    read_last: Mapping[Value, int]
    """Values that are needed -> the last node of the backward that reads them, what lies in their
    storage, or what is made of them again."""


def needed_storages(
    graph: PlacementGraph, options: Sequence[NodeOption], recomputed: Collection[int]
) -> NeededStorages:
    """Find what the backward, and what of ``recomputed`` runs again for it, need of the forward."""
    needed: set[Value] = set()
    read_last: dict[Value, int] = {}
    again: list[int] = []
    kept: dict[int, tuple[int, ...]] = {}
    aliased: set[int] = set()
    # From the last reader to the first maker.
    for node in reversed(graph.nodes):
        if node.phase == "backward":
            needed.update(node.operands)
            for value in node.operands:
                read_last.setdefault(value, node.index)
            if node.kind == "experts" and node.index in recomputed:
                again.append(node.index)
            continue
        outputs = tuple(
            position
            for position in range(len(node.outputs))
            if Value(node.index, position) in needed
        )
        if node.kind == "experts" and node.index in recomputed:
            again.append(node.index)  # inside of its backward: its result stays what it was
        elif node.index in recomputed and outputs:
            again.append(node.index)
            needed.update(node.operands)
            until = max(read_last.get(Value(node.index, each), 0) for each in outputs)
            read_last.update({v: max(read_last.get(v, 0), until) for v in node.operands})
            continue
        if not outputs or node.kind in SOURCES:
            continue
        if is_view_like(node):
            source = node.operands[0]
            if options[source.node].outputs[source.output] == options[node.index].operands[0]:
                aliased.add(node.index)
                needed.add(source)
                of_views = (read_last.get(Value(node.index, each), 0) for each in outputs)
                read_last[source] = max(read_last.get(source, 0), *of_views)
                continue
        kept[node.index] = outputs
    return NeededStorages(
        kept=kept,
        aliased=frozenset(aliased),
        recomputed=tuple(reversed(again)),
        read_last=read_last,
    )
