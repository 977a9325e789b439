"""The calls that the operators of a captured graph make, on the values that they get there."""

from __future__ import annotations

from typing import Any

import torch
from simulated_ranks import Sample
from torch import nn
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import operator_name
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value


@torch.no_grad()
def calls_of_graph(
    graph: PlacementGraph, model: nn.Module, inputs: tuple[Any, ...]
) -> list[Sample]:
    """Each operator with what it is given when the graph runs whole; alike calls once."""
    values: dict[Value, Any] = {
        Value(index): tensor for index, tensor in _sources(graph, model, inputs).items()
    }
    calls: dict[str, Sample] = {}

    def filled(tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, Value) else leaf, tree)

    for node in graph.nodes:
        if node.kind == "share":
            values[Value(node.index)] = values[node.operands[0]]
        if node.kind != "operator":
            continue
        sample = Sample(
            operator=operator_name(node.target),
            args=filled(node.args),
            kwargs=filled(node.kwargs),
            exact=False,
            compared=None,
            stand_in=None,
        )
        for position, output in enumerate(sample.run(node.target, sample.args, sample.kwargs)):
            values[Value(node.index, position)] = output
        calls.setdefault(_signature(graph, node), sample)
    return list(calls.values())


def _sources(
    graph: PlacementGraph, model: nn.Module, inputs: tuple[Any, ...]
) -> dict[int, torch.Tensor]:
    assert graph.interface is not None
    leaves = pytree.tree_leaves((inputs, {}))
    tensors = {
        leaf.node: value
        for leaf, value in zip(graph.interface.inputs, leaves, strict=True)
        if leaf.node is not None
    }
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for node in graph.nodes:
        if node.kind in ("parameter", "buffer"):
            tensors[node.index] = state[str(node.target)].detach()
        elif node.kind == "tangent":
            spec = graph.spec(Value(node.index))
            generator = torch.Generator().manual_seed(node.index)
            tensors[node.index] = torch.randint(1, 3, spec.shape, generator=generator).to(
                spec.dtype
            )
    return tensors


def _signature(graph: PlacementGraph, node: PlacementNode) -> str:
    shapes = [graph.spec(value).shape for value in node.operands]
    return f"{node.target} {shapes} {node.constants}"
