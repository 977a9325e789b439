"""A graph as it was when it was scanned, made again after passes have edited it.

A scan knows what every node called and what was recorded for it. Checks that need the earlier graph
as a graph are rare, so that it is made when one asks, and not kept.
"""

from __future__ import annotations

from typing import Any, cast

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_passes._torch_internals import graph_module_without_code
from gt_passes.analysis.graph_scan import GraphScan


def made_again(scan: GraphScan) -> GraphModule:
    """The graph as it was, of new nodes with the names of the old ones.

    Metadata other than recorded values is what it is now, and so is what ``get_attr`` nodes name.

    Args:
        scan: of a well-formed graph, which may have been edited since.
    """
    graph = Graph()
    made: dict[Node, Node] = {}
    for node, call in scan.calls.items():
        target, args, kwargs = (  # types of a node's that a call knows less of
            cast(Any, part) for part in (call.target, call.args, call.kwargs)
        )
        copy = made[node] = graph.create_node(
            node.op,
            target,
            map_arg(args, made.__getitem__),
            map_arg(kwargs, made.__getitem__),
            name=node.name,
        )
        copy.meta = {**node.meta, "val": call.value}
    return graph_module_without_code(scan.graph_module, graph)
