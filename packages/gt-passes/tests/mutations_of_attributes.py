"""Bugs in what ``get_attr`` nodes stand for: no node changes, and the step computes another thing."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from mutation_kinds import Edit, kind, live_nodes
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

_OTHER_OPERATOR = {
    aten.ge.Tensor: aten.le.Tensor,
    aten.add.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.add.Tensor,
}


def _attributes(graph: Graph, kind_of_value: type) -> list[Node]:
    live = live_nodes(graph)
    return [
        node
        for node in graph.find_nodes(op="get_attr")
        if any(user in live for user in node.users)
        and isinstance(getattr(graph.owning_module, node.target), kind_of_value)
    ]


def _with_another_operator(subgraph: GraphModule) -> GraphModule | None:
    """The subgraph, in which one operator is another now; None where there is none to change."""
    for inner in subgraph.graph.nodes:
        if inner.target in _OTHER_OPERATOR:
            inner.target = _OTHER_OPERATOR[inner.target]
            subgraph.recompile()
            return subgraph
    return None


def _has_another_operator(graph: Graph, node: Node) -> bool:
    subgraph = getattr(graph.owning_module, node.target)
    return any(inner.target in _OTHER_OPERATOR for inner in subgraph.graph.nodes)


@kind
def edited_subgraph(graph: Graph) -> Iterator[tuple[str, Edit]]:
    """FlexAttention's mask, edited in place: it sees the future."""
    for node in _attributes(graph, GraphModule):
        if _has_another_operator(graph, node):

            def edit(graph, nodes, name=node.target):
                _with_another_operator(getattr(graph.owning_module, name))

            yield node.name, edit


@kind
def replaced_subgraph(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in _attributes(graph, GraphModule):
        if _has_another_operator(graph, node):

            def edit(graph, nodes, name=node.target):
                owner = graph.owning_module
                setattr(owner, name, _with_another_operator(copy.deepcopy(getattr(owner, name))))

            yield node.name, edit


@kind
def overwritten_constant(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in _attributes(graph, torch.Tensor):

        def edit(graph, nodes, name=node.target):
            # As `x.data.add_(1)`, which counts as no new version of x.
            getattr(graph.owning_module, name).data.add_(1)

        yield node.name, edit


@kind
def replaced_constant(graph: Graph) -> Iterator[tuple[str, Edit]]:
    for node in _attributes(graph, torch.Tensor):

        def edit(graph, nodes, name=node.target):
            owner = graph.owning_module
            setattr(owner, name, getattr(owner, name) + 1)

        yield node.name, edit
