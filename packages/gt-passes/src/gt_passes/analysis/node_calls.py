"""What a node calls and on what: arguments by name, its operator run on other values, new calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from gt_config.node_keys import ModuleAnnotation, PhaseAnnotation
from gt_passes._torch_internals import OpOverload, fake_mode_of, quiet_fake_execution, value_of
from gt_passes.errors import NO_FAKE_VALUES, GraphInputError
from gt_trace.node_metadata import read_annotation, write_annotation


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments of a call of an operator, by the names of its schema and in its order."""
    assert isinstance(node.target, OpOverload)  # others have no schema
    return with_defaults(node.target, node.args, node.kwargs)


def with_defaults(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of an operator, by the names of its schema and in its order."""
    defaults = _defaults(target)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


# Schemas are read through pybind, which is slow, and a graph calls few operators often.
@functools.cache
def _defaults(target: OpOverload) -> dict[str, Any]:
    return {each.name: each.default_value for each in target._schema.arguments}


def evaluate(node: Node, values: Callable[[Node], object] = value_of) -> Any:
    """What the operator of a node gives on values of its inputs, by default the fake ones."""

    def load(leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        return subgraph_of(leaf) or values(leaf)

    args, kwargs = cast("Any", (map_aggregate(node.args, load), map_aggregate(node.kwargs, load)))
    assert callable(node.target)  # true of call_function nodes
    return node.target(*args, **kwargs)


def evaluate_apart(node: Node, values: Callable[[Node], object] = value_of) -> Any:
    """What ``evaluate`` gives, where an operator like ``t_`` changes none of the values themselves.

    Runs in the fake mode of the values.
    """
    if not isinstance(node.target, OpOverload) or torch.Tag.inplace_view not in node.target.tags:
        return evaluate(node, values)

    def copy_of(source: Node) -> object:
        value = values(source)
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )

    return evaluate(node, copy_of)


def call_like(like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Add a call to a graph, at its insertion point, that belongs where another node does.

    It has the module, the phase and the line of the program of ``like``, none of its other
    annotations, and the fake value that its operator gives on those of its inputs.

    Raises:
        GraphInputError: the graph has no fake values.
        Exception: what the operator says of its inputs; the graph is then as it was.
    """
    fake_mode = fake_mode_of(like.graph)
    if fake_mode is None:
        raise GraphInputError(NO_FAKE_VALUES)
    node = like.graph.call_function(target, args, kwargs)
    try:
        with quiet_fake_execution(fake_mode):
            node.meta["val"] = evaluate_apart(node)
    except Exception:
        like.graph.erase_node(node)
        raise
    for concept in (ModuleAnnotation, PhaseAnnotation):
        if (annotation := read_annotation(like, concept)) is not None:
            write_annotation(node, annotation)
    for key in ("stack_trace", "autograd_backward"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def subgraph_of(node: Node) -> GraphModule | None:
    """The graph that a node hands to an operator of operators; None of any other node."""
    graph_module = node.graph.owning_module
    if node.op != "get_attr" or graph_module is None:
        return None
    value = attribute_of(graph_module, node)
    return value if isinstance(value, GraphModule) else None


def attribute_of(graph_module: GraphModule, node: Node) -> object:
    """What a ``get_attr`` node stands for; None where there is no such attribute."""
    value: object = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value
