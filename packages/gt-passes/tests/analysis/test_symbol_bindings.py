"""Which node gives a size that depends on data its symbol."""

from __future__ import annotations

import torch
from pass_graphs import capture, node_of

from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.symbol_bindings import (
    bind_symbols_anew,
    renew_symbols,
    symbols_bound_by,
    symbols_of,
)


def test_copies_find_out_sizes_of_their_own_whatever_their_input_has_given_before():
    """As copies of chunks, whose fake values were made outside of any trace."""

    def step(counts):
        return torch.zeros(counts.sum().item(), 2)

    graph_module = capture(step, torch.tensor([2, 2]))
    nodes = list(graph_module.graph.nodes)
    scalar = node_of(graph_module, "_local_scalar_dense")
    fake_mode = scalar.args[0].meta["val"].fake_mode
    with fake_mode:
        scalar.meta["val"] = evaluate(scalar)
    bind_symbols_anew(scalar)
    taken = symbols_of(scalar.meta["val"])
    assert set(symbols_bound_by(scalar)) == taken

    renew_symbols(nodes[:-1], taken, fake_mode)

    (symbol,) = symbols_of(scalar.meta["val"])
    assert symbol not in taken
    assert set(symbols_bound_by(scalar)) == {symbol}
    with fake_mode:
        later = evaluate(scalar)
    assert symbols_of(later).isdisjoint({symbol, *taken})
