"""Numbers for sizes that depend on data."""

from __future__ import annotations

import pytest
import torch
from exchange_graphs import NUM_RANKS, capture_exchange
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gt_passes.simulation import SymbolSizes, balanced_exchange_sizes
from gt_passes.simulation.operands import output_operands


def exchanged(graph_module):
    """The tensors that the two exchanges return."""
    target = torch.ops._c10d_functional.all_to_all_single.default
    return graph_module.graph.find_nodes(op="call_function", target=target)


def test_balance_gives_a_rank_as_many_rows_as_it_sends():
    graph = capture_exchange(rows=64)
    sizes = balanced_exchange_sizes(graph)
    assert list(sizes.values()) == [64 // NUM_RANKS] * NUM_RANKS
    there, back = exchanged(graph)
    (taken,) = output_operands(there, SymbolSizes(sizes))
    assert taken.shape == (64, 8)
    (returned,) = output_operands(back, SymbolSizes(sizes))
    assert returned.shape == (64, 8)


def test_given_sizes_are_kept_and_the_rest_is_shared_out():
    graph = capture_exchange(rows=64)
    names = list(balanced_exchange_sizes(graph))
    sizes = balanced_exchange_sizes(graph, sizes={names[0]: 34})
    assert [sizes[name] for name in names] == [34, 10, 10, 10]


def test_an_unknown_size_counts_as_one_and_is_remembered():
    graph = capture_exchange()
    sizes = SymbolSizes()
    (taken,) = output_operands(exchanged(graph)[0], sizes)
    assert taken.shape == (NUM_RANKS, 8)
    assert len(sizes.assumed_symbols) == NUM_RANKS


def test_a_size_of_both_kinds_takes_the_traced_part_from_the_trace():
    graph = capture_exchange(rows=64, width=8, static_shapes=False)
    (there, _) = exchanged(graph)
    sizes = SymbolSizes(balanced_exchange_sizes(graph))
    received = there.meta["val"].numel()  # rows by width, of which only the rows depend on data
    assert len(received.node.expr.free_symbols) == NUM_RANKS + 1
    assert sizes.known_number(received) == sizes.number(received) == 64 * 8
    unknown = SymbolSizes()
    assert unknown.number(received) == NUM_RANKS * 8
    assert unknown.known_number(received) is None


@pytest.mark.parametrize(
    "size",
    [
        lambda rows, width: rows + width - 3,
        lambda rows, width: 2 * (rows + width) * 16 + rows * width * 3,
        lambda rows, width: (rows + 7) // 8 * width,
        lambda rows, width: torch.sym_max(rows, width) % 5,
    ],
)
def test_a_size_is_what_its_expression_says(size):
    shape_env = ShapeEnv()
    rows, width = (shape_env.create_unbacked_symint() for _ in range(2))
    sizes = SymbolSizes({str(rows): 21, str(width): 34})
    assert sizes.known_number(size(rows, width)) == int(size(21, 34))


def test_a_known_size_is_itself():
    assert SymbolSizes().number(17) == 17
    assert SymbolSizes().known_number(17) == 17


def test_pricing_adds_no_guards():
    graph = capture_exchange()
    (node, _) = exchanged(graph)
    shape_env = node.meta["val"].shape[0].node.shape_env
    before = len(shape_env.guards)
    output_operands(node, SymbolSizes(balanced_exchange_sizes(graph)))
    assert len(shape_env.guards) == before
