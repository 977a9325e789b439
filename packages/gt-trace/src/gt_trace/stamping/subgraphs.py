"""Graphs that operators of a layer take: the score and mask functions of FlexAttention.

A trace registers them at the root of the graph, under names that count up, and reads each by a
``get_attr`` node of the same name. Two layers have two of each, which compute the same; a layer
that is stamped gets copies. Autograd numbers inside of them say nothing (they are the counter at
the time, also in the backward) and are neither compared nor made anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gt_trace._torch_internals import lazy_graph_module
from gt_trace.stamping.layer_plan import PlannedLayers
from gt_trace.stamping.report import NotStampable


def subgraph_difference(ours: GraphModule, theirs: GraphModule) -> str | None:
    """What differs between what two graphs compute, on which values; None if nothing."""
    if ours.code != theirs.code:
        return "their code differs"
    for node, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        if node.op in ("get_attr", "call_module"):
            return f"{node.name} holds something of its own"
        if _facts(node.meta.get("val")) != _facts(other.meta.get("val")):
            return f"the values of {node.name} differ"
    return None


def require_like_subgraphs(
    ours: GraphModule, theirs: GraphModule, planned: PlannedLayers, where: str
) -> None:
    """The graphs of the two interior units differ in what belongs to their layer only.

    Raises:
        NotStampable: they do not.
    """
    difference = subgraph_difference(ours, theirs)
    if difference is not None:
        raise NotStampable(f"{where}: {difference}")
    for node, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        held, others = node.meta.get("custom"), other.meta.get("custom")
        if planned.in_last(held) != others:
            raise NotStampable(f"{where}: {node.name} is annotated with {held} and {others}")


def copy_subgraph(module: GraphModule, planned: PlannedLayers, unit: int) -> GraphModule:
    """The graph of the first interior unit as another unit has it."""
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in module.graph.nodes:
        copied = graph.node_copy(node, lambda read: made[read])
        # A new graph names its nodes alike, for they come in the same order; this makes sure.
        copied._rename(node.name)
        if "custom" in copied.meta:
            copied.meta["custom"] = planned.in_unit(copied.meta["custom"], unit)
        made[node] = copied
    return lazy_graph_module({}, graph, type(module).__name__)


def _facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return [_facts(each) for each in value]
    return value
