"""Nodes as they are collected, and how they become those of a graph that is planned.

What nothing needs is dropped, each value with several uses, like each parameter, gets its ``share``
node, and names are made unique.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt_autoparallel.graph.placement_graph import (
    SINKS,
    NodeKind,
    NodePhase,
    PlacementNode,
    TensorSpec,
    Value,
    with_leaves,
)


@dataclass(slots=True)
class DraftNode:
    """A node before share nodes are put in; arguments refer to draft nodes."""

    kind: NodeKind
    target: Any
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorSpec | None, ...] = ()
    module: str = ""
    phase: NodePhase = "forward"
    shared: bool = False
    """Whether a share node follows whatever the number of uses."""

    operands: list[Value] = field(default_factory=list)
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedNodes:
    """The nodes of a graph, and where drafts went."""

    nodes: tuple[PlacementNode, ...]
    number_of: Mapping[int, int]
    """Index of each draft's node, by the draft's position; those that nothing needs are missing."""


def number_nodes(drafts: Sequence[DraftNode]) -> NumberedNodes:
    """Drops, shares, names and numbers.

    *Before*: ``x = mm(a, w); relu(x); sum(x)``.
    *After*: ``x = mm(a, w/share); x/share; relu(x/share); sum(x/share)``.
    """
    alive = _alive(drafts)
    users: dict[Value, list[DraftNode]] = {}
    for draft, lives in zip(drafts, alive, strict=True):
        for value in draft.operands if lives else ():
            users.setdefault(value, []).append(draft)
    names: Counter[str] = Counter()
    nodes: list[PlacementNode] = []
    number_of: dict[int, int] = {}
    seen_as: dict[Value, Value] = {}

    def add(draft: DraftNode, **changes: Any) -> int:
        fields: dict[str, Any] = {
            name: getattr(draft, name)
            for name in ("kind", "target", "outputs", "module", "phase", "name", "line")
        }
        fields |= changes
        names[fields["name"]] += 1
        if names[fields["name"]] > 1:
            fields["name"] += f"_{names[fields['name']] - 1}"
        nodes.append(PlacementNode(index=len(nodes), **fields))
        return len(nodes) - 1

    for index, draft in enumerate(drafts):
        if not alive[index]:
            continue
        args, kwargs = with_leaves(
            lambda leaf: seen_as[leaf] if isinstance(leaf, Value) else leaf,
            (draft.args, draft.kwargs),
        )
        number = number_of[index] = add(draft, args=args, kwargs=kwargs)
        for position, spec in enumerate(draft.outputs):
            value = Value(index, position)
            seen_as[value] = Value(number, position)
            of_value = users.get(value, [])
            if len(of_value) > 1 or (draft.shared and of_value and not of_value[0].shared):
                share = add(
                    draft,
                    kind="share",
                    target="",
                    args=(Value(number, position),),
                    outputs=(spec,),
                    name=f"{nodes[number].name}/share",
                )
                seen_as[value] = Value(share)
    return NumberedNodes(nodes=tuple(nodes), number_of=number_of)


def _alive(drafts: Sequence[DraftNode]) -> list[bool]:
    """Parameters, sinks, and all that sinks need."""
    alive = [draft.kind == "parameter" or draft.kind in SINKS for draft in drafts]
    for index in reversed(range(len(drafts))):
        if alive[index]:
            for value in drafts[index].operands:
                alive[value.node] = True
    return alive
