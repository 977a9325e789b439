"""One look at every node of a graph, from which all checks of the verifier start.

Checks concern few nodes: collectives, writers, random draws. Each check that looked for them itself
would cost as much as all of them together do from here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from gt_passes._torch_internals import OpOverload, has_declared_effect
from gt_passes.analysis.aliasing import has_unknown_effects
from gt_passes.analysis.collectives import is_collective, is_declared_launch, is_wait
from gt_passes.analysis.graph_constants import FrozenAttribute, freeze_attribute
from gt_passes.analysis.operator_effects import (
    draws_random_numbers,
    is_barrier,
    reads_memory_layout,
)


class NodeCall(NamedTuple):
    """What a node stood for at one time. FX never changes these objects: it makes others."""

    target: object
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    value: object

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes among the arguments, each once."""
        found: dict[Node, None] = {}

        def note(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                found[leaf] = None
            return leaf

        map_aggregate(cast("Any", (self.args, self.kwargs)), note)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphScan:
    """The nodes of a graph as it was when scanned, sorted by what they do."""

    graph_module: GraphModule

    position: dict[Node, int]
    """Every node, in execution order, with its index."""

    calls: dict[Node, NodeCall]
    """Every node, in execution order, with what it called and what was recorded for it."""

    attributes: dict[Node, FrozenAttribute]
    """What every ``get_attr`` node stood for."""

    writers: tuple[Node, ...]
    """Nodes that write, or may write, to an argument; see
    ``gt_passes.analysis.aliasing.written_nodes``."""

    random: tuple[Node, ...]
    """Nodes that draw random numbers."""

    barriers: tuple[Node, ...]
    """Nodes that nothing may move across."""

    launches: tuple[Node, ...]
    """Launches of functional collectives."""

    declared_launches: tuple[Node, ...]
    """Launches that are none, of operators that ``declare_launch`` made known."""

    waits: tuple[Node, ...]
    """Waits for functional collectives."""

    effects: tuple[Node, ...]
    """Nodes that are there for something besides their result, and are none of the above: asserts,
    operators with a registered effect."""

    layout_readers: tuple[Node, ...]
    """Nodes whose result depends on how their arguments lie in memory."""

    @property
    def num_placeholders(self) -> int:
        """Number of inputs, which stand first in a well-formed graph."""
        return next(
            (index for node, index in self.position.items() if node.op != "placeholder"),
            len(self.position),
        )

    def still_holds(self) -> bool:
        """Whether nothing in the graph changed since, the order and its constants included."""
        nodes = self.graph_module.graph.nodes
        return (
            len(nodes) == len(self.calls)
            and all(
                node is old
                and node.args is call.args
                and node.target is call.target
                and node.kwargs is call.kwargs
                and node.meta.get("val") is call.value
                for node, (old, call) in zip(nodes, self.calls.items(), strict=True)
            )
            and all(
                freeze_attribute(self.graph_module, node) == frozen
                for node, frozen in self.attributes.items()
            )
        )

    def changed_nodes(self, before: GraphScan) -> Iterator[Node]:
        """The nodes that are new since ``before``, call something else, or have another value.

        Values and arguments are told apart as objects: what changed inside one is not seen. What
        ``get_attr`` nodes stand for is compared by content.
        """
        old_calls = before.calls
        for node, call in self.calls.items():
            old = old_calls.get(node)
            if (
                old is None
                or not all(map(operator.is_, old, call))
                or (node.op == "get_attr" and self.attributes[node] != before.attributes[node])
            ):
                yield node


class _Kind(NamedTuple):
    """What every call of one target does."""

    writes: bool
    may_be_random: bool
    is_barrier: bool
    is_launch: bool
    is_wait: bool
    has_effect: bool
    is_declared_launch: bool
    reads_layout: bool


_ORDINARY = _Kind(False, False, False, False, False, False, False, False)


@dataclass(slots=True)
class GraphScanner:
    """Scans graphs, and remembers from one to the next what operators do."""

    _kinds: dict[int, tuple[object, _Kind]] = field(default_factory=dict)
    """What each target does, by its identity, for which it is kept: operators are slow to hash."""

    def scan(self, graph_module: GraphModule) -> GraphScan:
        """Look at every node once."""
        position: dict[Node, int] = {}
        calls: dict[Node, NodeCall] = {}
        attributes: dict[Node, FrozenAttribute] = {}
        special: list[tuple[Node, _Kind]] = []
        kinds = self._kinds
        for index, node in enumerate(graph_module.graph.nodes):
            position[node] = index
            target = node.target
            calls[node] = NodeCall(target, node.args, node.kwargs, node.meta.get("val"))
            if node.op in ("placeholder", "get_attr", "output"):
                if node.op == "get_attr":
                    attributes[node] = freeze_attribute(graph_module, node)
                continue
            known = kinds.get(id(target))
            if known is None:
                known = kinds[id(target)] = (target, _kind_of(node))
            kind = known[1]
            if kind is not _ORDINARY:
                special.append((node, kind))
        return GraphScan(
            graph_module=graph_module,
            position=position,
            calls=calls,
            attributes=attributes,
            writers=tuple(node for node, kind in special if kind.writes),
            random=tuple(
                node for node, kind in special if kind.may_be_random and draws_random_numbers(node)
            ),
            barriers=tuple(node for node, kind in special if kind.is_barrier),
            launches=tuple(node for node, kind in special if kind.is_launch),
            declared_launches=tuple(node for node, kind in special if kind.is_declared_launch),
            waits=tuple(node for node, kind in special if kind.is_wait),
            effects=tuple(node for node, kind in special if kind.has_effect),
            layout_readers=tuple(node for node, kind in special if kind.reads_layout),
        )


def _kind_of(node: Node) -> _Kind:
    if node.op != "call_function":  # the check of well-formedness refuses it
        return _ORDINARY
    target = node.target
    kind = _Kind(
        writes=has_unknown_effects(node),
        may_be_random=False,
        is_barrier=is_barrier(node),
        is_launch=is_collective(node),
        is_wait=is_wait(node),
        has_effect=False,
        is_declared_launch=False,
        reads_layout=reads_memory_layout(node),
    )
    if isinstance(target, OpOverload):
        kind = kind._replace(
            writes=target._schema.is_mutable,
            may_be_random=torch.Tag.nondeterministic_seeded in target.tags,
        )
        if not any(kind) or kind == _ORDINARY._replace(reads_layout=True):
            has_effect = not target._schema.returns or has_declared_effect(node)
            kind = kind._replace(has_effect=has_effect)
        kind = kind._replace(is_declared_launch=is_declared_launch(node))
    return _ORDINARY if kind == _ORDINARY else kind
