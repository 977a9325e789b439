"""What a node calls and on what: arguments by name, its operator run on other values, new calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from gt_passes._torch_internals import OpOverload, value_of


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


def call_like(like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Add a call to a graph, at its insertion point, that belongs where another node does.

    It has the annotations of ``like`` (module, phase, line of the program), and the fake value that
    its operator gives on those of its inputs.
    """
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {key: value for key, value in like.meta.items() if key != "val"}
    node.meta["val"] = evaluate(node)
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
