"""Fresh size symbols may be renamed, each to one and no two to the same."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gt_passes.verifier.repropagation import equal_up_to_fresh_symbols

SHAPES = ShapeEnv()
FAKE = FakeTensorMode(shape_env=SHAPES)


def size() -> torch.SymInt:
    fresh = SHAPES.create_unbacked_symint()
    torch._check(fresh >= 0)
    return fresh


def zeros(*sizes: int | torch.SymInt) -> torch.Tensor:
    with FAKE:
        return torch.zeros(*sizes)


def test_a_fresh_symbol_may_stand_for_a_recorded_one():
    assert equal_up_to_fresh_symbols(zeros(size(), 3), zeros(size(), 3))
    assert equal_up_to_fresh_symbols(size(), size())


def test_a_fresh_symbol_stands_for_the_same_one_everywhere():
    a, b, fresh = size(), size(), size()
    assert equal_up_to_fresh_symbols((a, zeros(a, 2)), (fresh, zeros(fresh, 2)))
    assert not equal_up_to_fresh_symbols((a, zeros(b, 2)), (fresh, zeros(fresh, 2)))


def test_no_two_fresh_symbols_stand_for_the_same_one():
    a = size()
    assert not equal_up_to_fresh_symbols((a, a), (size(), size()))


def test_recorded_symbols_keep_their_meaning():
    a, b = size(), size()
    assert equal_up_to_fresh_symbols((a, b), (a, b))
    assert not equal_up_to_fresh_symbols((a, b), (b, a))


def test_expressions_are_equal_when_they_multiply_out_to_the_same():
    a = size()
    assert equal_up_to_fresh_symbols(2 * (a + 1), 2 * a + 2)
    assert not equal_up_to_fresh_symbols(2 * (a + 1), 2 * a + 1)


def test_numbers_and_symbols_differ():
    assert not equal_up_to_fresh_symbols(zeros(4, 3), zeros(size(), 3))
    assert not equal_up_to_fresh_symbols(zeros(size(), 3), zeros(4, 3))


def test_structures_of_other_sizes_differ():
    a = size()
    assert not equal_up_to_fresh_symbols((a,), (size(), size()))


def test_a_size_is_no_comparison_of_sizes():
    a, b = size(), size()
    assert not equal_up_to_fresh_symbols(a, torch.sym_max(a, b) == b)
    assert not equal_up_to_fresh_symbols(a < b, a)
