"""FSDP's collectives of a pipeline stage, put where the stage's cut will have them.

The cut takes gathers of parameters and reductions of gradients out, into graphs of their own. Until
then they stand between the chunks: what reads a parameter seems to wait for its gather, and none
may come between the halves of an exchange, so that chunks would make room for what goes away.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.order_constraints import OrderConstraints
from gt_trace.node_metadata import read_annotation


def set_fsdp_aside(graph_module: GraphModule) -> bool:
    """Move gathers, with what they need, to the front, and reductions with what follows to the end.

    Nothing moves where a gather needs what follows a reduction.

    Returns:
        Whether anything moved.
    """
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    predecessors = OrderConstraints(graph_module).predecessors(nodes)
    gathers: set[int] = set()
    reductions: set[int] = set()
    for i, node in enumerate(nodes):
        if _is_reduction(node) or not reductions.isdisjoint(predecessors[i]):
            reductions.add(i)
    pending = [i for i, node in enumerate(nodes) if _is_gather(node)]
    while pending:
        i = pending.pop()
        if i not in gathers:
            gathers.add(i)
            pending.extend(predecessors[i])
    if not gathers.isdisjoint(reductions):
        return False
    place = [(i in reductions) - (i in gathers) for i in range(len(nodes))]
    order = sorted(range(len(nodes)), key=lambda i: (place[i], i))
    for i in order:
        graph.output_node().prepend(nodes[i])
    return order != list(range(len(nodes)))


def _is_gather(node: Node) -> bool:
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    return collective is not None and collective.kind == "unshard"


def _is_reduction(node: Node) -> bool:
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    return collective is not None and collective.kind != "unshard" and is_collective(node)
