"""Which nodes stand between a parameter and who reads it, and before its gradient.

The audit's own opinion: ``graph/parameter_chains.py`` is checked by it, and not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from gt_autoparallel._torch_internals import OpOverload, operator_path
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value


def after_parameters(nodes: Sequence[PlacementNode]) -> set[int]:
    """Parameters, and casts of them: what leaves these is a parameter on its way to its users."""
    found: set[int] = set()
    for node in nodes:
        if node.kind == "parameter" or (
            _only_casts(node) and all(value.node in found for value in node.operands)
        ):
            found.add(node.index)
    return found


def gathering_nodes(nodes: Sequence[PlacementNode]) -> set[int]:
    """Nodes that make parameters what they are computed with: casts, and what shares them."""
    parameters = after_parameters(nodes)
    shares = {n.index for n in nodes if n.kind == "share" and n.operands[0].node in parameters}
    return shares | {index for index in parameters if nodes[index].kind != "parameter"}


def before_gradients(nodes: Sequence[PlacementNode]) -> set[int]:
    """Gradients, and views, casts and sums that only they read."""
    readers: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        for value in node.operands:
            readers[value.node].append(node.index)
    found: set[int] = set()
    for node in reversed(nodes):
        passes_on = node.kind == "share" or _only_casts(node) or _only_views(node)
        only_read = len(readers[node.index]) == 1 and readers[node.index][0] in found
        if node.kind == "gradient" or (passes_on and only_read):
            found.add(node.index)
    return found


def _only_casts(node: PlacementNode) -> bool:
    if not isinstance(node.target, OpOverload) or len(node.operands) != 1:
        return False
    return ".".join(operator_path(node.target)[:2]) in (
        "aten._to_copy",
        "prims.convert_element_type",
    )


def _only_views(node: PlacementNode) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    returned = node.target._schema.returns
    return bool(returned) and all(each.alias_info is not None for each in returned)


def made_gradients(graph: PlacementGraph) -> Iterator[tuple[Value, torch.dtype]]:
    """What the backward makes for each gradient, and the dtype in which it is reduced."""
    passing_on = before_gradients(graph.nodes)
    for node in graph.of_kind("gradient"):
        value = node.operands[0]
        reduced_as = graph.spec(value).dtype
        while value.node in passing_on:
            if graph.nodes[value.node].kind == "share":
                reduced_as = graph.spec(value).dtype
            value = graph.nodes[value.node].operands[0]
        yield value, reduced_as
