"""Which node gives a data-dependent size its symbol, as compilers read it off a graph.

A node that finds out a size (``_local_scalar_dense``) says in ``node.meta["unbacked_bindings"]``
which symbol its result is, and where in it. Whoever runs the graph on other fake values, as
AOTAutograd does, takes results of two nodes that say the same symbol for one number.

Source: PyTorch, ``torch/fx/experimental/symbolic_shapes.py`` (``rebind_unbacked``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

import torch
from torch.fx import Node

from gt_passes._torch_internals import (
    FakeTensorMode,
    pytree,
    quiet_fake_execution,
    value_of,
)
from gt_passes.analysis.node_calls import evaluate

_KEY: Final = "unbacked_bindings"


def symbols_bound_by(node: Node) -> Mapping[Any, Any]:
    """The symbols that a node's result is the first to have, and where in it each is."""
    found: Mapping[Any, Any] = node.meta.get(_KEY) or {}
    return found


def bind_symbols_anew(node: Node) -> None:
    """Let a copy of a node, whose fake value was made anew, bind the symbols of that value."""
    if paths := symbols_bound_by(node).values():
        value = value_of(node)
        node.meta[_KEY] = {pytree.key_get(value, path).node.expr: path for path in paths}


def symbols_of(value: object) -> set[Any]:
    """The symbols in a size, or in the sizes of the tensors of a value."""
    if isinstance(value, torch.SymInt):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*map(symbols_of, value.shape))
    if isinstance(value, (tuple, list)):
        return set().union(*map(symbols_of, value))
    return set()


def renew_symbols(nodes: Iterable[Node], taken: Set[Any], fake_mode: FakeTensorMode) -> None:
    """Let copies of nodes, put beside others of the same symbols, find out sizes of their own.

    Args:
        nodes: the copies, in the order of a graph that has its module.
        taken: the symbols that are another's; fake values that mention one are made anew.
        fake_mode: that of the values.
    """
    # Fake tensors know which symbol they gave, until the next epoch: the copies must not be told
    # those of the others, nor whoever comes after them those of the copies.
    fake_mode.epoch += 1
    with quiet_fake_execution(fake_mode, learns_sizes=True):
        for node in nodes:
            if not taken.isdisjoint(symbols_of(value_of(node))):
                node.meta["val"] = evaluate(node)
                bind_symbols_anew(node)
    fake_mode.epoch += 1
