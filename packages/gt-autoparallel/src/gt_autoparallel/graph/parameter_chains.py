"""Which nodes stand between a parameter and its first redistribution, and before its gradient.

::

    parameter -> [cast to the compute dtype] -> share or operator                  unshard
    operator -> [views] -> [cast to the reduce dtype] -> [cast back] -> gradient   reduce gradient

A redistribution along these arrows is what FSDP calls unshard and reduce-scatter of gradients.
"""

from __future__ import annotations

from typing import Literal

import torch

from gt_autoparallel._torch_internals import OpOverload, operator_path, views_first_argument
from gt_autoparallel.graph.draft_nodes import DraftNode
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode

ParameterMove = Literal["unshard", "reduce_grad"]
"""What a redistribution does for a parameter: bring it to its users, or its gradient home."""

_CASTS = frozenset({("aten", "_to_copy"), ("prims", "convert_element_type")})


def is_cast(node: PlacementNode | DraftNode) -> bool:
    """Whether a node only changes the dtype of one tensor."""
    if node.kind != "operator" or not isinstance(node.target, OpOverload):
        return False
    return operator_path(node.target)[:2] in _CASTS and len(node.operands) == 1


def is_view(node: PlacementNode) -> bool:
    """Whether a node's results are in the storage of its first operand."""
    return (
        node.kind == "operator"
        and isinstance(node.target, OpOverload)
        and views_first_argument(node.target)
    )


def is_view_like(node: PlacementNode) -> bool:
    """Whether a node's results are in the storage of its first operand, if the layout stays."""
    return node.kind == "share" or is_view(node)


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
    """From each gradient's node, and what views, casts or shares for it alone, to the parameter.

    A share node with a single use is where a gradient is summed before it is cast.
    """
    num_uses = [0] * len(graph.nodes)
    for use in graph.uses:
        num_uses[use.value.node] += 1
    chains: dict[int, str] = {}
    for node in reversed(graph.nodes):
        if node.kind == "gradient":
            chains[node.index] = str(node.target)
        if node.index not in chains:
            continue
        producer = graph.nodes[node.operands[0].node]
        passes_on = producer.kind == "share" or is_cast(producer) or is_view(producer)
        if passes_on and num_uses[producer.index] == 1:
            chains[producer.index] = chains[node.index]
    return chains


def summed_later(graph: PlacementGraph) -> frozenset[int]:
    """The nodes of gradient chains into which nothing is redistributed.

    A sum over ranks is made in the dtype that was asked for, hence not on the way into a cast, nor
    before one to a wider dtype.
    """
    chains = gradient_chains(graph)
    found: set[int] = set()
    widened: set[int] = set()  # before a cast to a wider dtype, or views that lead to one
    for node in reversed(graph.nodes):
        if node.index not in chains:
            continue
        leads_on = is_view(node) and node.index in widened
        if is_cast(node) or leads_on:
            found.add(node.index)
        if leads_on or (is_cast(node) and _is_wider(node, graph)):
            widened.add(node.operands[0].node)
    return frozenset(found)


def _is_wider(cast: PlacementNode, graph: PlacementGraph) -> bool:
    """Whether a cast loses nothing."""
    before, after = graph.spec(cast.operands[0]).dtype, cast.output().dtype
    return torch.promote_types(before, after) == after
