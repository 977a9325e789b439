"""A forward is differentiated with the operands that its backward is given, and keeps none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gt_autoparallel.apply.recorded_forward import record_forward

TOKENS, WIDTH, HIDDEN = 5, 3, 4


def hidden(given: Sequence[Tensor]) -> Tensor:
    """(tokens, weight) -> their product, with an activation in between; reads the weight turned."""
    tokens, weight = given
    return (tokens @ weight.transpose(0, 1)).tanh()


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(TOKENS, WIDTH), torch.randn(HIDDEN, WIDTH)


def is_alive(of: StorageWeakRef) -> bool:
    return not of.expired()


def test_gradients_are_those_of_autograd_bit_for_bit() -> None:
    gradient = torch.randn(TOKENS, HIDDEN)
    result, recorded = record_forward(hidden, operands(), differentiate=(0, 1))
    leaves = [each.requires_grad_() for each in operands()]
    expected = torch.autograd.grad(hidden(leaves), leaves, gradient)
    found = recorded.gradients(gradient, operands())
    assert torch.equal(result, hidden(operands()))
    assert not result.requires_grad
    assert all(map(torch.equal, found, expected))


def test_an_operand_of_which_nobody_asks_the_gradient_has_none() -> None:
    _, recorded = record_forward(hidden, operands(), differentiate=(1,))
    (of_weight,) = recorded.gradients(torch.ones(TOKENS, HIDDEN), operands())
    assert of_weight.shape == (HIDDEN, WIDTH)


@pytest.mark.parametrize("position", [0, 1])
def test_nothing_is_kept_of_an_operand(position: int) -> None:
    given = list(operands())
    watched = StorageWeakRef(given[position].untyped_storage())
    _, recorded = record_forward(hidden, given, differentiate=(0, 1))
    assert is_alive(watched)
    given.clear()
    assert not is_alive(watched)
    assert len(recorded.gradients(torch.ones(TOKENS, HIDDEN), operands())) == 2


def test_the_backward_reads_the_operands_that_it_is_given() -> None:
    tokens, weight = operands()
    gradient = torch.randn(TOKENS, HIDDEN)
    result, recorded = record_forward(hidden, (tokens, weight), differentiate=(0, 1))
    of_tokens, of_weight = recorded.gradients(gradient, (3 * tokens, 2 * weight))
    before_tanh = gradient * (1 - result**2)
    torch.testing.assert_close(of_tokens, before_tanh @ (2 * weight))
    torch.testing.assert_close(of_weight, before_tanh.T @ (3 * tokens))


def test_what_is_a_part_or_a_copy_of_an_operand_is_kept() -> None:
    def of_parts(given: Sequence[Tensor]) -> Tensor:
        tokens, weight = given
        return (tokens[:2] * 1.0) @ weight[1:].clone().transpose(0, 1)

    tokens, weight = operands()
    _, recorded = record_forward(of_parts, (tokens, weight), differentiate=(0,))
    (of_tokens,) = recorded.gradients(torch.ones(2, HIDDEN - 1), (tokens, 2 * weight))
    torch.testing.assert_close(of_tokens[:2], torch.ones(2, HIDDEN - 1) @ weight[1:])
