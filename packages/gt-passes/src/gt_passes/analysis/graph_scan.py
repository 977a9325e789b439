"""One look at every node of a graph, from which all checks of the verifier start.

Checks concern few nodes: collectives, writers, random draws. Each check that looked for them itself
would cost as much as all of them together do from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.aliasing import has_unknown_effects, may_write, written_nodes
from gt_passes.analysis.call_form import CallForm, call_form
from gt_passes.analysis.collectives import is_collective, is_declared_launch, is_wait
from gt_passes.analysis.graph_constants import FrozenAttribute, freeze_attribute
from gt_passes.analysis.host_copies import is_host_copy
from gt_passes.analysis.operator_effects import (
    draws_random_numbers,
    has_other_effect,
    is_barrier,
    reads_memory_layout,
)
from gt_passes.analysis.outlined_region import region_of


@dataclass(slots=True, eq=False)
class NodeCall:
    """What a node stood for at one time. FX never changes these objects: it makes others."""

    target: object
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    value: object
    _split: tuple[CallForm, tuple[Node, ...]] | None = None

    def split(self) -> tuple[CallForm, tuple[Node, ...]]:
        """The call's form and operands; see ``call_form``."""
        if self._split is None:
            self._split = call_form(self.target, self.args, self.kwargs)
        return self._split

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes among the arguments, each once."""
        return tuple(dict.fromkeys(self.split()[1]))

    def is_of(self, node: Node) -> bool:
        """Whether a node still stands for this."""
        return (
            node.args is self.args
            and node.meta.get("val") is self.value
            and node.target is self.target
            and node.kwargs is self.kwargs
        )


class CallKind(NamedTuple):
    """What every call of one target does."""

    writes: bool
    may_be_random: bool
    is_barrier: bool
    is_launch: bool
    is_wait: bool
    has_effect: bool
    is_declared_launch: bool
    reads_layout: bool
    is_host_copy: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class GraphScan:
    """The nodes of a graph as it was when scanned, sorted by what they do."""

    graph_module: GraphModule

    position: dict[Node, int]
    """Every node, in execution order, with its index."""

    calls: dict[Node, NodeCall]
    """Every node, in execution order, with what it called and what was recorded for it."""

    kinds: dict[Node, CallKind]
    """The nodes that do something besides making their result, in execution order."""

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

    host_copies: tuple[Node, ...]
    """Starts of copies to and from host memory, and waits for them."""

    effects: tuple[Node, ...]
    """Nodes that are there for something besides their result, and are none of the above: asserts,
    operators with a registered effect."""

    layout_readers: tuple[Node, ...]
    """Nodes whose result depends on how their arguments lie in memory."""

    _changed: MutableMapping[GraphScan, list[Node]] = field(
        init=False, default_factory=WeakKeyDictionary
    )
    """What ``changed_nodes`` has answered."""

    @property
    def num_placeholders(self) -> int:
        """Number of inputs, which stand first in a well-formed graph."""
        return next(
            (index for node, index in self.position.items() if node.op != "placeholder"),
            len(self.position),
        )

    def is_reordered(self, before: GraphScan) -> bool:
        """Whether nodes that ``before`` has too changed places since."""
        places = [place for place in map(before.position.get, self.position) if place is not None]
        return places != sorted(places)  # which is quick where they are in order

    def still_holds(self) -> bool:
        """Whether nothing in the graph changed since, the order and its constants included."""
        nodes = self.graph_module.graph.nodes
        if len(nodes) != len(self.calls):
            return False
        for node, old, call in zip(nodes, self.calls, self.calls.values(), strict=True):
            if node is not old or not call.is_of(node):
                return False
        return all(
            freeze_attribute(self.graph_module, node) == frozen
            for node, frozen in self.attributes.items()
        )

    def changed_nodes(self, before: GraphScan) -> Sequence[Node]:
        """The nodes that are new since ``before``, call something else, or have another value.

        Values and arguments are told apart as objects: what changed inside one is not seen. What
        ``get_attr`` nodes stand for is compared by content.

        Args:
            before: that this scan was made with.
        """
        changed = self._changed.get(before)
        if changed is None:
            known = before.calls.get
            changed = self._changed[before] = [
                node
                for node, call in self.calls.items()
                if known(node) is not call
                or (node.op == "get_attr" and self.attributes[node] != before.attributes[node])
            ]
        return changed


_ORDINARY = CallKind(*[False] * len(CallKind._fields))


@dataclass(slots=True)
class GraphScanner:
    """Scans graphs, and remembers from one to the next what operators do."""

    _kinds: dict[int, tuple[object, CallKind]] = field(default_factory=dict)
    """What each target does, by its identity, for which it is kept: operators are slow to hash."""

    def scan(self, graph_module: GraphModule, *, before: GraphScan | None = None) -> GraphScan:
        """Look at every node once.

        Args:
            graph_module: any.
            before: an earlier scan, with which the new one shares what is as it was.
        """
        nodes = list(graph_module.graph.nodes)
        known_call = ({} if before is None else before.calls).get
        calls: dict[Node, NodeCall] = {}
        fresh: list[Node] = []
        for node in nodes:
            call = known_call(node)
            if (  # as NodeCall.is_of, which is slower to call than to do
                call is None
                or node.args is not call.args
                or node.meta.get("val") is not call.value
                or node.target is not call.target
                or node.kwargs is not call.kwargs
            ):
                call = NodeCall(node.target, node.args, node.kwargs, node.meta.get("val"))
                fresh.append(node)
            calls[node] = call
        position = dict(zip(nodes, range(len(nodes)), strict=True))
        kinds = self._kinds_of(fresh)
        if before is not None:
            kinds |= {
                node: kind
                for node, kind in before.kinds.items()
                if calls.get(node) is before.calls[node]
            }
            kinds = {node: kinds[node] for node in sorted(kinds, key=position.__getitem__)}
        return GraphScan(
            graph_module=graph_module,
            position=position,
            calls=calls,
            kinds=kinds,
            attributes={
                node: freeze_attribute(graph_module, node)
                for node in graph_module.graph.find_nodes(op="get_attr")
            },
            writers=tuple(node for node, kind in kinds.items() if kind.writes),
            random=tuple(
                node
                for node, kind in kinds.items()
                if kind.may_be_random and draws_random_numbers(node)
            ),
            barriers=tuple(node for node, kind in kinds.items() if kind.is_barrier),
            launches=tuple(node for node, kind in kinds.items() if kind.is_launch),
            declared_launches=tuple(
                node for node, kind in kinds.items() if kind.is_declared_launch
            ),
            waits=tuple(node for node, kind in kinds.items() if kind.is_wait),
            host_copies=tuple(node for node, kind in kinds.items() if kind.is_host_copy),
            effects=tuple(node for node, kind in kinds.items() if kind.has_effect),
            layout_readers=tuple(node for node, kind in kinds.items() if kind.reads_layout),
        )

    def _kinds_of(self, nodes: Iterable[Node]) -> dict[Node, CallKind]:
        """What nodes do, of those that do something besides making their result."""
        found: dict[Node, CallKind] = {}
        for node in nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            known = self._kinds.get(id(node.target))
            if known is None:
                known = (node.target, _kind_of(node))
                if region_of(node) is None:  # all regions have one target
                    self._kinds[id(node.target)] = known
            if known[1] is not _ORDINARY:
                found[node] = known[1]
        return found


def _kind_of(node: Node) -> CallKind:
    if node.op != "call_function":  # the check of well-formedness refuses it
        return _ORDINARY
    target = node.target
    kind = CallKind(
        writes=has_unknown_effects(node) or any(True for _ in written_nodes(node)),
        may_be_random=region_of(node) is not None,
        is_barrier=is_barrier(node),
        is_launch=is_collective(node),
        is_wait=is_wait(node),
        has_effect=False,
        is_declared_launch=False,
        reads_layout=reads_memory_layout(node),
        is_host_copy=is_host_copy(node),
    )
    if isinstance(target, OpOverload):
        kind = kind._replace(
            writes=may_write(target),
            may_be_random=torch.Tag.nondeterministic_seeded in target.tags,
        )
        if not any(kind) or kind == _ORDINARY._replace(reads_layout=True):
            kind = kind._replace(has_effect=has_other_effect(node))
        kind = kind._replace(is_declared_launch=is_declared_launch(node))
    return _ORDINARY if kind == _ORDINARY else kind
