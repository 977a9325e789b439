"""Which nodes may share memory, and which of that memory is written to.

``operator_aliases`` says what the results of operators alias, and what they write. Nodes fall
into classes: two nodes of different classes never share memory, two of one class may. What has no
schema is taken to alias and to write all that it touches, so that the answer errs towards "may".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, Node

from gt_passes._torch_internals import HigherOrderOperator, OpOverload, is_fake_tensor, layout_of
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.node_calls import arguments_of, attribute_of
from gt_passes.analysis.operator_aliases import (
    AliasedArgument,
    aliased_arguments,
    has_aliased_results,
)
from gt_passes.analysis.outlined_region import OutlinedRegion, region_inputs, region_of

_WRITES_DESPITE_SCHEMA = {
    **dict.fromkeys(
        (
            *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
            *("aten::_batch_norm_impl_index", "aten::batch_norm"),
        ),
        "training",
    ),
    "aten::instance_norm": "use_input_stats",
    "aten::batch_norm_update_stats": None,
    "aten::batch_norm_gather_stats": None,
    "aten::batch_norm_gather_stats_with_counts": None,
}
"""Operators that write running statistics without a mark in their schemas: by qualified name, the
argument that must be true for it. Measured by comparing the arguments of every operator of
PyTorch's samples before and after each call."""

_RUNNING_STATISTICS = ("running_mean", "running_var")

_PURE_HIGHER_ORDER_OPERATORS = frozenset({"flex_attention", "flex_attention_backward"})
"""They write to nothing, and their results are memory of their own."""

_PURE_FUNCTIONS = frozenset(
    {
        *(abs, bool, float, int, len, max, min, round, sum),
        *(operator.abs, operator.add, operator.and_, operator.eq, operator.floordiv, operator.ge),
        *(
            operator.getitem,
            operator.gt,
            operator.invert,
            operator.le,
            operator.lshift,
            operator.lt,
        ),
        *(operator.matmul, operator.mod, operator.mul, operator.ne, operator.neg, operator.not_),
        *(
            operator.or_,
            operator.pos,
            operator.pow,
            operator.rshift,
            operator.sub,
            operator.truediv,
        ),
        operator.xor,
    }
)
"""Functions of Python in captured graphs. Others of their modules write, as ``operator.iadd``."""


class AliasClasses:
    """The alias classes of one graph, as it was when they were computed.

    Linear in the size of the graph. ``merge`` keeps them true when a pass makes one node stand for
    another.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {node: node for node in graph.nodes}
        self._written: set[Node] = set()
        self._reshaped: set[Node] = set()
        self._inputs: set[Node] = set()
        self._outputs: set[Node] = set()
        for node in graph.nodes:
            for source in shared_nodes(node):
                self._union(source, node)
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._inputs.add(self._find(node))
            elif node.op == "output":
                self._outputs.update(self._find(result) for result in node.all_input_nodes)
            for written in written_nodes(node):
                self._written.add(self._find(written))
                if _writes_metadata(node):
                    self._reshaped.add(self._find(written))

    def class_of(self, node: Node) -> Node:
        """One node that stands for the class, the same for all of it until the next ``merge``."""
        return self._find(node)

    def is_written(self, node: Node) -> bool:
        """Whether any operator may write to memory that the node may share."""
        return self._find(node) in self._written

    def is_reshaped(self, node: Node) -> bool:
        """Whether an operator like ``t_`` may change shape or strides of a node of the class."""
        return self._find(node) in self._reshaped

    def holds_input(self, node: Node) -> bool:
        """Whether the memory may be that of a graph input or of a constant of the graph."""
        return self._find(node) in self._inputs

    def holds_output(self, node: Node) -> bool:
        """Whether an output of the graph may share the memory."""
        return self._find(node) in self._outputs

    def merge(self, first: Node, second: Node) -> None:
        """From now on the classes of the two nodes are one."""
        self._union(first, second)

    def _find(self, node: Node) -> Node:
        root = node
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[node] is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def _union(self, first: Node, second: Node) -> None:
        kept, gone = self._find(first), self._find(second)
        if kept is gone:
            return
        self._parent[gone] = kept
        for flagged in (self._written, self._reshaped, self._inputs, self._outputs):
            if gone in flagged:
                flagged.add(kept)


def has_unknown_effects(node: Node) -> bool:
    """Whether a node calls something of which neither a schema nor a name says that it is pure."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op != "call_function":
        return True
    if isinstance(node.target, OpOverload):
        return False
    region = region_of(node)
    if region is not None:
        return any(map(has_unknown_effects, region.body.graph.nodes))
    if isinstance(node.target, HigherOrderOperator):
        return not _makes_fresh_results(node.target)
    module, name = (getattr(node.target, key, "") for key in ("__module__", "__name__"))
    # torch.sym_max and its like, on symbolic sizes
    is_of_sizes = module == "torch" and name.removeprefix("_").startswith("sym_")
    return not (is_of_sizes or module == "math" or node.target in _PURE_FUNCTIONS)


def _makes_fresh_results(target: object) -> bool:
    return isinstance(target, HigherOrderOperator) and str(target) in _PURE_HIGHER_ORDER_OPERATORS


def written_nodes(node: Node) -> Iterator[Node]:
    """The arguments whose memory a node writes, or may write if it has unknown effects."""
    region = region_of(node)
    if has_unknown_effects(node):
        yield from node.all_input_nodes
    elif region is not None:
        inputs = region_inputs(node)
        yield from (inputs[position] for position in _memory_of(region).written_inputs)
    elif isinstance(node.target, OpOverload) and may_write(node.target):
        if not node.target._schema.is_mutable:
            yield from _written_statistics(node)
            return
        for argument in aliased_arguments(node.target):
            if argument.is_written:
                yield from _nodes_of(argument, node)


def _written_statistics(node: Node) -> Iterator[Node]:
    assert isinstance(node.target, OpOverload)  # the caller has looked
    arguments = arguments_of(node)
    switch = _WRITES_DESPITE_SCHEMA[node.target._schema.name]
    if switch is None or arguments[switch]:
        for name in _RUNNING_STATISTICS:
            if isinstance(arguments[name], Node):
                yield arguments[name]


def shared_nodes(node: Node) -> Iterator[Node]:
    """The arguments whose memory the result of a node may share; of a constant, the same ones."""
    if node.op == "get_attr":
        yield from nodes_of_same_constant(node)
        return
    if node.op in ("placeholder", "output"):
        return
    target = node.target
    region = region_of(node)
    if region is not None:
        inputs = region_inputs(node)
        yield from (inputs[position] for position in _memory_of(region).shared_inputs)
    elif _makes_fresh_results(target):
        return
    elif not isinstance(target, OpOverload) or is_wait(node):
        yield from node.all_input_nodes
    elif has_aliased_results(target):
        for argument in aliased_arguments(target):
            if argument.may_alias(node):
                yield from _nodes_of(argument, node)


def nodes_of_same_constant(node: Node) -> Iterator[Node]:
    """The other ``get_attr`` nodes of a graph whose tensors lie in the same storage."""
    storage = _storage_of_constant(node)
    if storage is None:
        return
    for other in node.graph.find_nodes(op="get_attr"):
        if other is not node and _storage_of_constant(other) == storage:
            yield other


def _storage_of_constant(node: Node) -> int | None:
    graph_module = node.graph.owning_module
    value = None if graph_module is None else attribute_of(graph_module, node)
    if not isinstance(value, torch.Tensor) or is_fake_tensor(value):
        return None
    if layout_of(value) is not torch.strided or value.is_meta:
        return None
    return value.untyped_storage().data_ptr() or None


class _RegionMemory(NamedTuple):
    """Positions of a region's inputs."""

    shared_inputs: tuple[int, ...]
    """An output may share their memory."""

    written_inputs: tuple[int, ...]
    """The region writes to their memory, or may."""


_region_memory: WeakKeyDictionary[OutlinedRegion, _RegionMemory] = WeakKeyDictionary()


def _memory_of(region: OutlinedRegion) -> _RegionMemory:
    """Regions do not change, and many nodes may call one: what is found is kept."""
    if region not in _region_memory:
        aliases = AliasClasses(region.body.graph)
        inputs = region.body.graph.find_nodes(op="placeholder")
        _region_memory[region] = _RegionMemory(
            shared_inputs=tuple(i for i, node in enumerate(inputs) if aliases.holds_output(node)),
            written_inputs=tuple(i for i, node in enumerate(inputs) if aliases.is_written(node)),
        )
    return _region_memory[region]


def _nodes_of(argument: AliasedArgument, node: Node) -> Iterator[Node]:
    value = argument.of(node)
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, Node):
            yield item


@functools.cache
def may_write(target: OpOverload) -> bool:
    """Whether some call of an operator writes to an argument."""
    return target._schema.is_mutable or target._schema.name in _WRITES_DESPITE_SCHEMA


def _writes_metadata(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags
