"""Operators see one symbol for a long sum, and their results have the sum afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gt_trace._torch_internals import FakeTensorMode, ShapeEnv
from gt_trace.stamping.shortened_sizes import ShortenedSizes


@pytest.fixture
def env() -> Any:
    return ShapeEnv()


@pytest.fixture
def rows(env: Any) -> Any:
    """A sum of six sizes."""
    with env.ignore_fresh_unbacked_symbols():
        sizes = [env.create_unbacked_symint() for _ in range(6)]
    for size in sizes:
        torch._check(size >= 0)
    return sum(sizes)


@pytest.fixture
def whole(rows: Any) -> Any:
    """What that is an expression of."""
    return rows.node.expr


def all_sizes(tensor: torch.Tensor) -> list[Any]:
    sizes: tuple[Any, ...] = (*tensor.shape, *tensor.stride())
    sizes = (*sizes, tensor.numel(), tensor.untyped_storage().nbytes())
    return [getattr(getattr(size, "node", None), "expr", size) for size in sizes]


def results(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, x.double(), x.t(), torch.cat([x, x], 1), x * x, x.new_empty(x.shape[0] + 3)]


def test_results_are_those_of_the_sum(env, rows, whole):
    sizes = ShortenedSizes(env)
    with FakeTensorMode(shape_env=env):
        expected = [all_sizes(each) for each in results(torch.empty((rows, 8)))]
        x = torch.empty((rows, 8))
        sizes.shorten(x, is_new=True)
        found = results(x)
    assert [each.shape[0].node.expr.is_Symbol for each in (*found[:2], *found[3:5])] == [True] * 4
    sizes.restore([found[:2], *found[2:]])
    assert [all_sizes(each) for each in found] == expected
    assert set(env.var_to_range) == whole.free_symbols


def test_only_sums_that_are_short_already_need_not_be_new(env, rows, whole):
    sizes = ShortenedSizes(env)
    with FakeTensorMode(shape_env=env):
        first, second = torch.empty((rows, 8)), torch.empty((rows, 2))
    sizes.shorten(second, is_new=False)
    assert second.shape[0].node.expr == whole
    sizes.shorten(first, is_new=True)
    sizes.shorten(second, is_new=False)
    assert first.shape[0].node.expr == second.shape[0].node.expr != whole


def test_what_is_told_of_a_short_size_is_told_of_the_sum(env, rows, whole):
    sizes = ShortenedSizes(env)
    with FakeTensorMode(shape_env=env):
        x = torch.empty((rows, 8))
        sizes.shorten(x, is_new=True)
        torch._check(x.shape[0] % 3 == 1)
    sizes.restore([x])
    told = [each.expr for asserts in env.deferred_runtime_asserts.values() for each in asserts]
    assert told
    assert {symbol for each in told for symbol in each.free_symbols} == whole.free_symbols


def test_a_replacement_that_was_found_is_forgotten(env, rows, whole):
    sizes = ShortenedSizes(env)
    with FakeTensorMode(shape_env=env):
        x = torch.empty((rows, 8))
    sizes.shorten(x, is_new=True)
    assert not sizes.forget_values()
    env.replacements[x.shape[0].node.expr] = next(iter(whole.free_symbols))
    assert sizes.forget_values()
    sizes.restore([x])
    assert not env.replacements
    assert x.shape[0].node.expr == whole


def test_what_is_known_of_a_sum_is_not_found_again(env, rows, whole):
    sizes = ShortenedSizes(env)
    with FakeTensorMode(shape_env=env):
        x = torch.empty((rows, 8))
        torch._check(rows == 64)
        asserts = {key: list(each) for key, each in env.deferred_runtime_asserts.items()}
        sizes.shorten(x, is_new=True)
        sizes.tell(x, 64)
        assert (x * torch.empty((64, 1))).shape[0] == 64
        assert not sizes.forget_values()
        sizes.restore([x])
    assert env.deferred_runtime_asserts == asserts


def test_a_number_and_a_short_sum_stay_as_they_are(env, rows, whole):
    sizes = ShortenedSizes(env)
    with FakeTensorMode(shape_env=env):
        x = torch.empty((7, 8))
        sizes.shorten(x, is_new=True)
        sizes.tell(x, 7)
        sizes.restore([x])
    assert x.shape == (7, 8)
