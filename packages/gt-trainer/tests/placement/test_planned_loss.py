"""The loss of logits in chunks: that of all at once, with its gradient, up to the order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchtitan.components.loss import CrossEntropyLoss

from gt_trainer.placement.planned_loss import LossOfLogits, num_chunks

SAMPLES, VOCABULARY = 2, 50


@pytest.mark.parametrize("length", [16, 12, 7])
def test_a_loss_in_chunks_has_the_value_and_the_gradient_of_the_whole(length: int) -> None:
    torch.manual_seed(length)
    values = torch.randn(SAMPLES, length, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (SAMPLES, length))
    labels[0, :3] = -100  # torchtitan's IGNORE_INDEX
    valid = torch.tensor(SAMPLES * length - 3)
    results: list[tuple[Tensor, Tensor]] = []
    for config in (
        CrossEntropyLoss.Config(),
        LossOfLogits.Config(loss_fn=CrossEntropyLoss.Config()),
    ):
        logits = values.clone().requires_grad_()
        loss, metrics = config.build()(logits, labels, valid)
        assert metrics == {}
        (gradient,) = torch.autograd.grad(3 * loss, logits)
        results.append((loss.detach().double(), gradient))
    (whole, whole_gradient), (chunked, chunked_gradient) = results
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked_gradient, whole_gradient, rtol=1e-6, atol=1e-9)


def test_chunks_are_as_many_as_divide_the_tokens_up_to_eight() -> None:
    assert [num_chunks(length) for length in (4096, 12, 7)] == [8, 4, 1]


def test_an_evaluation_makes_no_gradient() -> None:
    logits = torch.randn(SAMPLES, 8, VOCABULARY)
    loss, _ = LossOfLogits.Config(loss_fn=CrossEntropyLoss.Config()).build()(
        logits, torch.zeros(SAMPLES, 8, dtype=torch.int64)
    )
    assert not loss.requires_grad
