"""Run a planned graph whole, on global tensors: what its placed form is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value

RunExperts = Callable[[PlacementNode, Sequence[Any]], Sequence[torch.Tensor | None]]
"""From a node of kind ``experts`` and its arguments to its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalResult:
    """What a graph gives."""

    outputs: dict[str, torch.Tensor]
    """By the name of the output node."""

    gradients: dict[str, torch.Tensor]
    """By the name of the parameter."""


@torch.no_grad()
def run_globally(
    graph: PlacementGraph,
    tensors: Mapping[str, torch.Tensor],
    *,
    run_experts: RunExperts | None = None,
) -> GlobalResult:
    """Run the graph as one process would.

    Args:
        graph: what to run.
        tensors: for each parameter, buffer, input and tangent node, by its name, a tensor of its
            shape. Tied parameters go by the name of their node.
        run_experts: runs nodes of kind ``experts``; needed if there are any.

    Raises:
        ValueError: tensors are missing; all of them are named.
    """
    sources = ("parameter", "buffer", "input", "tangent")
    missing = [n.name for n in graph.nodes if n.kind in sources and n.name not in tensors]
    if missing:
        raise ValueError(f"tensors of these nodes are missing: {missing!r}")
    values: dict[Value, Any] = {}
    outputs: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}

    def filled(tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, Value) else leaf, tree)

    for node in graph.nodes:
        if node.kind in sources:
            values[Value(node.index)] = tensors[node.name]
            continue
        args, kwargs = filled(node.args), filled(node.kwargs)
        if node.kind == "output":
            outputs[node.name] = args[0]
        elif node.kind == "gradient":
            gradients[str(node.target)] = args[0]
        elif node.kind == "share":
            values[Value(node.index)] = args[0]
        else:
            if node.kind == "experts":
                if run_experts is None:
                    raise ValueError(f"node {node.name} holds experts; give run_experts")
                results: Any = run_experts(node, args)
            else:
                results = node.target(*args, **kwargs)
            several = isinstance(results, (tuple, list))
            for position, result in enumerate(results if several else (results,)):
                values[Value(node.index, position)] = result
    return GlobalResult(outputs=outputs, gradients=gradients)
