"""Kinds of graph bugs, as a wrong pass would make them, at every site of a graph that has one.

A kind is a function from a graph to its bugs: names of nodes, and an edit. Edits keep recorded
values right where a careful but wrong pass would, so that a bug is not caught for a reason that it
need not have. Only nodes on which an output or an effect depends are sites, since nothing can be
wrong with what nobody reads; further sites that would change nothing are left out where the comment
beside says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import GraphPass, PassContext, PassReport
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.operator_effects import draws_random_numbers, is_barrier, is_only_a_view
from gt_passes.analysis.tensor_signature import signature

aten = torch.ops.aten
functional = torch.ops._c10d_functional

Edit = Callable[[Graph, dict[str, Node]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One bug, to be put into a copy of the graph that it was found for."""

    kind: str
    site: str
    edit: Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutate(GraphPass):
    """A wrong pass: it declares what most passes declare, and puts a bug into the graph."""

    name: ClassVar[str] = "mutate"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    bug: Bug

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        graph = graph_module.graph
        self.bug.edit(graph, {node.name: node for node in graph.nodes})
        return PassReport(changed=True)


BugKind = Callable[[Graph], Iterator[tuple[str, Edit]]]

KINDS: dict[str, BugKind] = {}
"""By name, in the order of this file."""


def kind(function: BugKind) -> BugKind:
    """Register a kind by the name of its function."""
    KINDS[function.__name__.replace("_", "-")] = function
    return function


def find_bugs(graph: Graph, name: str) -> list[Bug]:
    """All bugs of a kind in a graph, in the order of their sites."""
    return [Bug(kind=name, site=site, edit=edit) for site, edit in KINDS[name](graph)]


# What sites are chosen by.


def live_nodes(graph: Graph) -> list[Node]:
    """Calls on which an output or an effect depends, in order."""
    live: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        effect = node.op == "output" or any(True for _ in written_nodes(node)) or is_barrier(node)
        if effect or draws_random_numbers(node) or node in live:
            live[node] = None
            live.update(dict.fromkeys(node.all_input_nodes))
    return [node for node in graph.nodes if node in live and node.op == "call_function"]


def value(node: Node) -> Any:
    return node.meta["val"]


def is_float(node: Any) -> bool:
    if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return value(node).is_floating_point()


def has_known_sizes(node: Node) -> bool:
    results = value(node) if isinstance(value(node), (list, tuple)) else [value(node)]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return all(type(size) is int for tensor in tensors for size in tensor.shape)


def same_kind(first: Node, second: Node) -> bool:
    return signature(value(first)) == signature(value(second))


def origin(node: Node) -> Node:
    """The node whose elements a view, copy or wait has."""
    while node.op == "call_function" and node.all_input_nodes:
        if not (is_only_a_view(node) or is_wait(node) or node.target is aten.clone.default):
            break
        node = node.all_input_nodes[0]
    return node


def computes_the_same(first: Node, second: Node) -> bool:
    """Whether two nodes are one expression written twice, and so not a bug to confuse."""
    first, second = origin(first), origin(second)
    if first is second:
        return True
    if first.target is not second.target or len(first.args) != len(second.args):
        return False
    if first.op != "call_function" or draws_random_numbers(first):
        return False
    return all(map(_same_arguments, first.args, second.args))


def _same_arguments(mine: object, theirs: object) -> bool:
    if isinstance(mine, Node) and isinstance(theirs, Node):
        return computes_the_same(mine, theirs)
    if isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(_same_arguments, mine, theirs))
    return mine == theirs


def arguments(node: Node) -> list[int]:
    return [index for index, item in enumerate(node.args) if isinstance(item, Node)]


def add_call(graph: Graph, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
    """A new node with its recorded value, at the place where the graph inserts."""
    node = graph.call_function(target, args, kwargs)
    tensors = [item for item in args if isinstance(item, Node)]
    mode = value(tensors[0]).fake_mode
    with mode:
        node.meta["val"] = target(
            *(value(item) if isinstance(item, Node) else item for item in args), **kwargs
        )
    return node


def replace_argument(name: str, index: int, other: str) -> Edit:
    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        nodes[name].update_arg(index, nodes[other])

    return edit


def set_argument(name: str, index: int, constant: Any) -> Edit:
    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        nodes[name].update_arg(index, constant)

    return edit


def forward_to(name: str, other: str) -> Edit:
    """Readers of one node read another."""

    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        node, by = nodes[name], nodes[other]
        node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by)

    return edit


def move_before(name: str, place: str) -> Edit:
    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        nodes[place].prepend(nodes[name])

    return edit


def move_after(name: str, place: str) -> Edit:
    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        nodes[place].append(nodes[name])

    return edit


def record(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(graph: Graph, nodes: dict[str, Node]) -> None:
        with value(nodes[name]).fake_mode:
            nodes[name].meta["val"] = change(value(nodes[name]))

    return edit
