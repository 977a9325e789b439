"""Which nodes stand between a parameter and its first redistribution, and before its gradient.

::

    parameter -> [cast to the compute dtype] -> share or operator        unshard
    operator  -> [cast to the reduce dtype] -> [cast back] -> gradient   reduce gradient

A redistribution along these arrows is what FSDP calls unshard and reduce-scatter of gradients.
"""

from __future__ import annotations

from gt_autoparallel._torch_internals import OpOverload, operator_path
from gt_autoparallel.graph.draft_nodes import DraftNode
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode

_CASTS = frozenset({("aten", "_to_copy"), ("prims", "convert_element_type")})


def is_cast(node: PlacementNode | DraftNode) -> bool:
    """Whether a node only changes the dtype of one tensor."""
    if node.kind != "operator" or not isinstance(node.target, OpOverload):
        return False
    return operator_path(node.target)[:2] in _CASTS and len(node.operands) == 1


def parameter_chains(graph: PlacementGraph) -> dict[int, str]:
    """From each parameter's node, and each cast of a parameter alone, to the parameter's name."""
    chains: dict[int, str] = {}
    for node in graph.nodes:
        if node.kind == "parameter":
            chains[node.index] = str(node.target)
        elif is_cast(node) and node.operands[0].node in chains:
            chains[node.index] = chains[node.operands[0].node]
    return chains


def gradient_chains(graph: PlacementGraph) -> dict[int, str]:
    """From each gradient's node, and what casts or shares for it alone, to the parameter's name.

    A share node with a single use is where a gradient is summed before it is cast.
    """
    num_uses = [0] * len(graph.nodes)
    for use in graph.uses():
        num_uses[use.value.node] += 1
    chains: dict[int, str] = {}
    for node in reversed(graph.nodes):
        if node.kind == "gradient":
            chains[node.index] = str(node.target)
        if node.index not in chains:
            continue
        producer = graph.nodes[node.operands[0].node]
        passes_on = is_cast(producer) or producer.kind == "share"
        if passes_on and num_uses[producer.index] == 1:
            chains[producer.index] = chains[node.index]
    return chains
