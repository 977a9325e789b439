"""Which memory every node of a graph holds: one number for each storage, as executed.

Memory is held by storages, not by nodes: a view holds what it views, an in-place operator writes
where something already is, and a wait returns what its collective filled. ``operator_aliases``
decides here, since fake values cannot: a node that stands for another one may share its fake value
and still make new memory.

``aliasing`` answers a different question about the same operators: which nodes *may* share
memory, in doubt too many. Here every storage counts once, so that bytes add up.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import (
    OpOverload,
    device_of,
    fast_tensor_attributes,
    layout_of,
)
from gt_passes.analysis.collectives import FUNCTIONAL_COLLECTIVES, is_wait
from gt_passes.analysis.operator_aliases import (
    AliasedArgument,
    only_makes_views,
    result_sources,
)
from gt_passes.analysis.symbol_sizes import SymbolSizes, balanced_exchange_sizes

Held = int | tuple["Held", ...] | None
"""The storages of a value, in its structure: a number for a tensor, None for what is no tensor."""


class Storages:
    """The storages of one graph, numbered in the order in which they are made.

    Linear in the size of the graph, which must not change meanwhile.

    Args:
        graph_module: with fake values in ``node.meta["val"]``.
        block_bytes: sizes are rounded up to a multiple.
        symbol_sizes: what symbols without a hint stand for, by name; None for what they are when
            every all-to-all gives a rank as much as it takes.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        *,
        block_bytes: int = 1,
        symbol_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._block_bytes = block_bytes
        if symbol_sizes is None:
            symbol_sizes = balanced_exchange_sizes(graph_module)
        self._sizes = SymbolSizes(symbol_sizes)
        self.nodes: tuple[Node, ...] = tuple(graph_module.graph.nodes)
        """In execution order."""

        self.num_bytes: list[int] = []
        """The size of each storage."""

        self.maker: list[Node] = []
        """The node that makes each storage, or the placeholder that brings it."""

        self.made_at: list[int] = []
        """The position of each storage's maker."""

        self.device_type: list[str] = []
        """The kind of device on which each storage lies."""

        self.held: dict[Node, Held] = {}
        """What each node holds."""

        self.communication: list[Node] = []
        """Launches of functional collectives, and waits for them, in execution order."""

        self.num_unsized = 0
        """Storages whose size depends on data and counts as nothing."""

        with fast_tensor_attributes():
            for position, node in enumerate(self.nodes):
                self.held[node] = self._held_by(node, position)

    def of(self, node: Node) -> tuple[int, ...]:
        """The storages that a node's result holds."""
        return tuple(flat(self.held[node]))

    def of_arguments(self, node: Node) -> tuple[int, ...]:
        """The storages that the arguments of a node hold, in order; some may repeat."""
        return tuple(
            storage for argument in node.all_input_nodes for storage in flat(self.held[argument])
        )

    def _held_by(self, node: Node, position: int) -> Held:
        if node.op == "output":
            return None
        target, value = node.target, node.meta.get("val")
        if target is operator.getitem:
            source, index = node.args[0], node.args[1]
            held = self.held[source] if isinstance(source, Node) else None
            return held[index] if isinstance(held, tuple) and isinstance(index, int) else held
        sources = None
        if isinstance(target, OpOverload):
            sources, is_communication = _behavior_of(target)
            if is_communication:
                self.communication.append(node)
                if is_wait(node):
                    return self.held[node.all_input_nodes[0]]
        if sources is None:
            return self._fresh(node, value, position)
        if len(sources) == 1:
            return self._result(node, sources[0], value, position)
        values = value if isinstance(value, (tuple, list)) else ()
        return tuple(
            self._result(node, source, item, position)
            for source, item in zip(sources, values, strict=False)
        )

    def _result(
        self, node: Node, source: AliasedArgument | None, value: object, position: int
    ) -> Held:
        """What one result holds: the memory of the argument it aliases, or its own."""
        if source is None or not source.may_alias(node):
            return self._fresh(node, value, position)
        argument = source.of(node)
        if isinstance(argument, Node):
            held = self.held[argument]
            if isinstance(value, (tuple, list)) and not isinstance(held, tuple):
                return (held,) * len(value)  # the views that a split makes
            return held
        if isinstance(argument, (tuple, list)):
            return tuple(self.held[item] if isinstance(item, Node) else None for item in argument)
        return None

    def _fresh(self, node: Node, value: object, position: int) -> Held:
        if isinstance(value, (tuple, list)):
            return tuple(self._fresh(node, item, position) for item in value)
        if not isinstance(value, torch.Tensor):
            return None
        num_bytes = _storage_bytes(value, self._sizes)
        if num_bytes is None:
            self.num_unsized += 1
            num_bytes = 0
        self.num_bytes.append(-(-num_bytes // self._block_bytes) * self._block_bytes)
        self.maker.append(node)
        self.made_at.append(position)
        self.device_type.append(device_of(value).type)
        return len(self.num_bytes) - 1


@functools.cache
def gives_a_view(target: OpOverload) -> bool:
    """Whether the one result of an operator lies in the memory of its argument, as it is there."""
    return len(target._schema.returns) == 1 and only_makes_views(target)


@functools.cache
def _behavior_of(target: OpOverload) -> tuple[tuple[AliasedArgument | None, ...] | None, bool]:
    """What the results of an operator alias, None if all are new, and whether it communicates."""
    sources = result_sources(target)
    return sources if any(sources) else None, target.namespace in FUNCTIONAL_COLLECTIVES


def flat(held: Held) -> Iterator[int]:
    """The storages of a value, in order."""
    if isinstance(held, int):
        yield held
    elif held is not None:
        for item in held:
            yield from flat(item)


def _storage_bytes(tensor: torch.Tensor, sizes: SymbolSizes) -> int | None:
    """Bytes of the storage behind a tensor that was just made; None if they are not known."""
    if layout_of(tensor) is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return sizes.known_number(tensor.untyped_storage().nbytes())
