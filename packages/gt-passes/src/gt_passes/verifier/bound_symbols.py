"""Every data-dependent size is found out by one node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.symbol_bindings import symbols_bound_by, symbols_of
from gt_passes.graph_problem import GraphProblem


def find_symbol_problems(nodes: Iterable[Node]) -> Iterator[GraphProblem]:
    """Yield a problem for each symbol that a node binds and that was bound before.

    Args:
        nodes: all of a graph, in its order.
    """
    bound: dict[Any, Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            bound.update(dict.fromkeys(symbols_of(value_of(node)), node))
            continue
        for symbol in symbols_bound_by(node):
            if symbol in bound:
                yield GraphProblem(
                    check="fake re-propagation",
                    node_name=node.name,
                    target=str(node.target),
                    message=f"it says that its result is {symbol}, as {bound[symbol]} does: a "
                    "compiler would take both for one number",
                )
            bound[symbol] = node
