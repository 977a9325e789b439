"""What nodes do besides computing: barriers, random draws, views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pass_graphs import capture, node_of
from torch.fx import Graph, Node

from gt_passes.analysis.operator_effects import (
    draws_random_numbers,
    is_barrier,
    is_only_a_view,
    reads_only_metadata,
)

aten = torch.ops.aten
Q = torch.ones(1, 1, 4, 8)


@pytest.fixture
def custom_operators() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        yield library


def call(target: object, *args: object, **kwargs: object) -> Node:
    graph = Graph()
    x = graph.placeholder("x")
    return graph.call_function(
        target, tuple(x if argument == "x" else argument for argument in args), kwargs
    )


def test_a_custom_operator_without_tags_is_a_barrier(custom_operators):
    custom_operators.define("opaque(Tensor x) -> Tensor")
    assert is_barrier(call(torch.ops.gt_passes_test.opaque.default, "x"))


def test_a_custom_operator_that_is_tagged_as_pure_is_no_barrier(custom_operators):
    custom_operators.define("scale(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    assert not is_barrier(call(torch.ops.gt_passes_test.scale.default, "x"))


def test_a_custom_operator_that_only_follows_the_rules_of_tracing_is_a_barrier(custom_operators):
    custom_operators.define("log(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    assert is_barrier(call(torch.ops.gt_passes_test.log.default, "x"))


def test_operators_of_pytorch_are_no_barriers():
    for target in (
        aten.mm.default,
        aten.add_.Tensor,
        torch.ops._c10d_functional.all_reduce.default,
    ):
        assert not is_barrier(call(target, "x", "x"))
    assert not is_barrier(call(aten.mm.default, "x", "x").all_input_nodes[0])


def test_functions_of_nobody_known_are_barriers():
    assert is_barrier(call(test_functions_of_nobody_known_are_barriers, "x"))
    assert is_barrier(call(torch.ops.higher_order.cond, "x"))
    assert not is_barrier(call(torch.ops.higher_order.flex_attention, "x"))


def test_attention_draws_random_numbers_only_with_dropout():
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not draws_random_numbers(call(attention, "x", "x", "x"))
    assert not draws_random_numbers(call(attention, "x", "x", "x", 0.0, True))
    assert draws_random_numbers(call(attention, "x", "x", "x", 0.1))
    assert draws_random_numbers(call(attention, "x", "x", "x", dropout_p=0.1))
    assert draws_random_numbers(call(aten.rand.default, [2]))
    assert draws_random_numbers(call(aten.bernoulli_.float, "x"))
    assert not draws_random_numbers(call(aten.mm.default, "x", "x"))


def test_views_read_nothing():
    graph_module = capture(lambda x: (x.view(-1), x.split(2)[0].cos(), x.t()), torch.ones(4, 6))
    views = ["view", "split", "getitem", "t"]
    assert all(is_only_a_view(node_of(graph_module, name)) for name in views)
    assert not is_only_a_view(node_of(graph_module, "cos"))
    for target in (aten.add_.Tensor, aten.reshape.default, aten.split_with_sizes_copy.default):
        assert not is_only_a_view(call(target, "x", "x"))


def test_sizes_are_no_data():
    assert reads_only_metadata(call(aten.sym_size.int, "x", 0))
    assert not reads_only_metadata(call(aten.view.default, "x", [4]))
