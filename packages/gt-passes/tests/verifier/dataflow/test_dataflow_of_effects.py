"""Writes, random numbers, unknown operators and asserts: what may cross what."""

from __future__ import annotations

import pytest
import torch
from program_pairs import X, Y, aten, same


def test_can_write_to_parts_in_any_order():
    def before(x, y):
        buffer = x.clone()
        buffer[0].copy_(y[0])
        buffer[1].mul_(2.0)
        return buffer * 2

    def after(x, y):
        buffer = x.clone()
        buffer[1].mul_(2.0)
        buffer[0].copy_(y[0])
        return buffer * 2

    assert same(before, after, X, Y)


def test_can_build_a_buffer_with_cat_or_by_copies():
    def before(x, y):
        buffer = torch.empty(16, 4)
        buffer[:8].copy_(x)
        buffer[8:].copy_(y)
        return buffer @ y.t()

    def after(x, y):
        return torch.cat([x, y]) @ y.t()

    assert same(before, after, X, Y)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda x, y: (x.exp(), x.mul_(2.0)), id="read-too-early"),
        pytest.param(lambda x, y: (x.mul(2.0).exp(), x), id="write-dropped"),
        pytest.param(lambda x, y: (x.mul_(2.0).mul_(2.0).exp(), x), id="write-doubled"),
        pytest.param(lambda x, y: (y.mul_(2.0).exp(), x), id="another-input-written"),
        pytest.param(lambda x, y: (x[:4].mul_(2.0), x.exp(), x)[1:], id="part-written"),
    ],
)
def test_cannot_change_what_is_written(after):
    def before(x, y):
        x.mul_(2.0)
        return x.exp(), x

    assert not same(before, after, X, Y)


def test_cannot_leave_something_else_in_an_input():
    def before(x, y):
        x[0].copy_(y[0])
        return y.exp()

    def after(x, y):
        x[1].copy_(y[0])
        return y.exp()

    assert not same(before, after, X, Y)


def test_cannot_move_a_write_that_goes_through_strides_across_a_read():
    def before(x, y):
        buffer = x.clone()
        first = buffer.sum()
        buffer[:, 0].copy_(y[:, 0])
        return first, buffer.sum()

    def after(x, y):
        buffer = x.clone()
        buffer[:, 0].copy_(y[:, 0])
        first = buffer.sum()
        return first, buffer.sum()

    assert same(before, before, X, Y)
    assert not same(before, after, X, Y)


def test_cannot_draw_in_another_order_twice_or_less():
    def before(x, y):
        return torch.rand_like(x), torch.rand_like(y).exp()

    def swapped(x, y):
        second = torch.rand_like(y).exp()
        return torch.rand_like(x), second

    def drawn_again(x, y):
        return torch.rand_like(x), torch.rand_like(y).exp(), torch.rand_like(y)

    def shared(x, y):
        drawn = torch.rand_like(x)
        return drawn, drawn.exp()

    assert same(before, before, X, Y)
    for after in (swapped, drawn_again, shared):
        assert not same(before, after, X, Y)


@torch.library.custom_op("gt_test_dataflow::log", mutates_args=())
def log(x: torch.Tensor) -> torch.Tensor:
    """An operator of which nothing is known."""
    return x.clone()


@log.register_fake
def _log(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_cannot_reorder_or_repeat_unknown_operators():
    def before(x, y):
        return log(x), log(y)

    def swapped(x, y):
        second = log(y)
        return log(x), second

    def repeated(x, y):
        log(x)
        return log(x), log(y)

    def draw_before(x, y):
        torch.rand_like(x)
        return log(x), log(y)

    assert same(before, before, X, Y)
    for after in (swapped, repeated, draw_before):
        assert not same(before, after, X, Y)


def test_an_unknown_operator_may_draw_so_that_no_draw_crosses_it():
    def before(x, y):
        return torch.rand_like(x), log(y)

    def after(x, y):
        logged = log(y)
        return torch.rand_like(x), logged

    assert not same(before, after, X, Y)


def test_an_unknown_operator_may_read_buffers_so_that_no_write_to_one_crosses_it():
    def before(x, y):
        x.add_(1.0)
        return log(y)

    def after(x, y):
        logged = log(y)
        x.add_(1.0)
        return logged

    assert same(before, before, X, Y)
    assert not same(before, after, X, Y)


def test_cannot_drop_an_assert():
    def before(x, y):
        aten._assert_async.msg(x.sum() > 0, "negative")
        return y.exp()

    assert same(before, before, X, Y)
    assert not same(before, lambda x, y: y.exp(), X, Y)
