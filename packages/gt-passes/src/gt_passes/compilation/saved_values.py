"""Let a compiled step keep for its backward what the memory policy decided to keep.

Inductor computes an elementwise operator wherever its result is read, and keeps its operands
instead. Forward and backward of a step are one graph, so it does the same with what the backward
reads: of ``x + a + b``, kept as the input of a layer, it keeps ``a`` and ``b`` besides the ``x``
that the layer before has kept. Where the operands take more memory than the result, the result is
made a buffer of its own here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from gt_passes._torch_compilation_internals import buffer_operator
from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.tensor_signature import is_symbolic, signature
from gt_trace.node_metadata import phase_of

_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})

_MOST_OPERANDS = 8
"""Inductor makes a buffer of what reads more."""


def keep_saved_values(body: GraphModule) -> GraphModule:
    """A graph in which results that the backward reads are buffers, where that takes less memory.

    *Before*::

        y = add(x, mm_1)                 # forward
        ...
        z = mul(gradient, y)             # backward: computes y again, and keeps mm_1 for it

    *After*::

        y = add(x, mm_1);  kept = inductor_force_stride_order(y, [64, 1])
        ...
        z = mul(gradient, kept)

    Args:
        body: with fake values and phases. Stays as it is.

    Returns:
        A copy; ``body`` itself where nothing is to be kept.
    """
    kept = list(_Choice(body.graph).kept())
    if not kept:
        return body
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in kept:
        copied = copies[node]
        value = value_of(node)
        assert isinstance(value, torch.Tensor)  # as _Choice has asked
        with graph.inserting_after(copied):
            buffer = graph.call_function(buffer_operator(), (copied, list(value.stride())))
        buffer.meta = dict(copied.meta)
        for user in list(copied.users):
            if user is not buffer:
                user.replace_input_with(copied, buffer)
    return GraphModule(body, graph)


class _Choice:
    """What to keep. In execution order, so that a layer builds on what those before it keep."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._aliases = AliasClasses(graph)
        self._sources: dict[Node, frozenset[Node]] = {}
        """The buffers of which Inductor computes a value; itself for a buffer."""

        self._held: set[Node] = set()
        """Buffers that the backward reads in any case."""

    def kept(self) -> Iterator[Node]:
        saved = self._saved()
        for node in self._graph.nodes:
            sources = self._sources_of(node)
            if node not in saved:
                self._sources[node] = sources
                continue
            operands = sources - self._held
            if node not in sources and _num_bytes(node) < sum(map(_num_bytes, operands)):
                self._sources[node] = frozenset({node})
                yield node
            else:
                self._sources[node] = sources
            self._held |= self._sources[node]

    def _saved(self) -> set[Node]:
        """What the backward reads and did not make; of a view, what it views."""
        saved = set()
        for node in self._graph.nodes:
            if node.op == "call_function" and phase_of(node) == "backward":
                for argument in node.all_input_nodes:
                    while _is_view(argument):
                        argument = argument.all_input_nodes[0]
                    if phase_of(argument) != "backward":
                        saved.add(argument)
        return saved

    def _sources_of(self, node: Node) -> frozenset[Node]:
        if node.op in ("placeholder", "get_attr"):
            return frozenset()  # held by whoever calls the graph
        if not self._is_computed_where_read(node):
            return frozenset({node})
        sources = frozenset().union(*(self._sources[each] for each in node.all_input_nodes))
        return sources if len(sources) <= _MOST_OPERANDS else frozenset({node})

    def _is_computed_where_read(self, node: Node) -> bool:
        if _is_view(node):
            return True
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
            return False
        if self._aliases.is_written(node):
            return False
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or is_symbolic(signature(value)):
            return False
        return target in _CASTS or torch.Tag.pointwise in target.tags


def _is_view(node: Node) -> bool:
    """Whether a node is a view of its first argument; an item of several results is one of them."""
    return is_only_a_view(node) and node.target is not operator.getitem


def _num_bytes(node: Node) -> int:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or is_symbolic(signature(value)):
        return 0
    return value.numel() * value.element_size()
