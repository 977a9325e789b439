"""Tensors are made with one symbol for a long sum, and have the sum as their size afterwards."""

from __future__ import annotations

from typing import Any

import torch

from gt_trace._torch_internals import ShapeEnv, value_range
from gt_trace.stamping.long_sums import LongSums


def some_sizes(shape_env: Any, count: int, *, least: int = 0) -> list[Any]:
    with shape_env.ignore_fresh_unbacked_symbols():
        symbols = [shape_env.create_unbacked_symint().node.expr for _ in range(count)]
    for symbol in symbols:
        shape_env.var_to_range[symbol] = value_range(least, 2**40)
    return symbols


def test_a_sum_is_one_symbol_in_all_that_is_made_of_it():
    shape_env = ShapeEnv()
    total = sum(some_sizes(shape_env, 6))
    sums = LongSums(shape_env)
    one = sums.shortened(total, "unit")
    assert one.is_Symbol
    assert sums.shortened(14 * total, "unit") == 14 * one
    assert sums.shortened(total, "another unit") != one


def test_short_sums_and_what_may_be_negative_stay_as_they_are():
    shape_env = ShapeEnv()
    sums = LongSums(shape_env)
    for expression in (
        sum(some_sizes(shape_env, 2)),
        sum(some_sizes(shape_env, 6, least=-1)),
        3 * some_sizes(shape_env, 1)[0],
    ):
        assert sums.shortened(expression, "unit") is expression


def test_tensors_have_the_sum_as_their_size_once_it_is_settled():
    shape_env = ShapeEnv()
    symbols = some_sizes(shape_env, 6)
    total = sum(symbols)
    sums = LongSums(shape_env)
    size = shape_env.create_symintnode(sums.shortened(total, "unit"), hint=None)
    tensor = torch.empty((size, 8), device="meta")
    sums.remember(size, total)
    sums.settle()
    assert tensor.shape[0].node.expr == total
    assert tensor.t().shape[1].node.expr == total
    assert set(shape_env.var_to_range) == set(symbols)
