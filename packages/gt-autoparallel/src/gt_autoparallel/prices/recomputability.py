"""Which nodes of the forward may run once more in the backward, so that it keeps less.

What runs again lives from its first reader in the backward to its last one. So that this is one
layer's time, only what is in a layer runs again, and nothing that another layer reads, or that
leaves the model: such values are kept, as layers' inputs are under every policy of activation
checkpointing. Nor does what only the backward reads: it would run the first time for nobody.
Besides:

- random operators would draw other numbers;
- operators that decide between equals, as ``topk``, may decide otherwise the second time on a GPU.

FlexAttention runs again as any operator does: it is the largest of what a layer would keep.

Routed experts are differentiated as one, with what autograd recorded. Their forward may run again
as a part of their backward, which has all that it takes.
"""

from __future__ import annotations

import torch

from gt_autoparallel._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    operator_name,
    operator_path,
)
from gt_autoparallel.graph.layer_names import layer_of_module, window_scope
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode
from gt_passes.analysis.aliasing import may_write

_DECISIONS = frozenset({"topk", "sort", "argsort", "histc", "bincount"})
_FLEX_ATTENTION = "higher_order.flex_attention"


def recomputable_nodes(graph: PlacementGraph) -> frozenset[int]:
    """The nodes that may run again, as far as their operators and their readers allow it."""
    readers: dict[int, list[PlacementNode]] = {node.index: [] for node in graph.nodes}
    for node in graph.nodes:
        for value in node.operands:
            readers[value.node].append(node)
    leaves_scope: set[int] = set()
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if node.phase == "backward":
            continue
        for reader in readers[node.index]:
            passes_on = reader.index in leaves_scope and is_view_like(reader)
            elsewhere = reader.kind == "output" or window_scope(reader) != window_scope(node)
            if passes_on or elsewhere:
                leaves_scope.add(node.index)
        in_forward = any(reader.phase == "forward" for reader in readers[node.index])
        is_in_layer = layer_of_module(node.module) is not None
        if in_forward and is_in_layer and node.index not in leaves_scope and may_run_twice(node):
            found.add(node.index)
    return frozenset(found)


def repeatable_experts(graph: PlacementGraph) -> dict[int, int]:
    """From the forward of routed experts that may run again, those in layers, to its backward."""
    nodes, pairs = graph.nodes, experts_of(graph)
    return {f: b for f, b in pairs.items() if layer_of_module(nodes[f].module) is not None}


def experts_of(graph: PlacementGraph) -> dict[int, int]:
    """From the forward of routed experts to its backward, of those that have one."""
    nodes = graph.of_kind("experts")
    forward = {node.target: node.index for node in nodes if node.phase == "forward"}
    return {
        forward[node.target]: node.index
        for node in nodes
        if node.phase == "backward" and node.target in forward
    }


def may_run_twice(node: PlacementNode) -> bool:
    """Whether a node gives the same bits again, by its operator alone."""
    if node.kind == "share":
        return True
    if node.kind == "operator" and isinstance(node.target, HigherOrderOperator):
        return operator_name(node.target) == _FLEX_ATTENTION
    if node.kind != "operator" or not isinstance(node.target, OpOverload):
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    decides = operator_path(node.target)[1] in _DECISIONS
    return not (is_random or decides or may_write(node.target))
