"""Clipping and Adam on local parts have the bits that torchtitan's have on DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from local_update_cases import (
    clipped_elsewhere,
    differences,
    state_after_failure,
    what_steps_are_given,
)
from torch import nn
from torch.optim import Adam, AdamW

from gt_trace.testing import GlooWorkers
from gt_trainer.local_update import clip_gradients


@pytest.fixture(scope="module")
def four() -> Iterator[GlooWorkers]:
    with GlooWorkers(
        4, timeout=300, preload=["gt_trainer.testing", "local_update_cases"]
    ) as workers:
        yield workers


@pytest.mark.parametrize("with_experts", [False, True])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamW, {"foreach": True}),
        (AdamW, {"fused": True, "weight_decay": 0.1}),
        (AdamW, {"foreach": False, "amsgrad": True}),
        (Adam, {"foreach": True, "weight_decay": 0.1}),
    ],
)
def test_updates_on_four_ranks_are_torchtitans_bit_for_bit(
    make: type[Adam], options: dict[str, Any], with_experts: bool, four: GlooWorkers
) -> None:
    assert four.run(differences, make, options, with_experts) == [[]] * 4


def test_adam_alone_steps_on_plain_tensors(four: GlooWorkers) -> None:
    assert four.run(what_steps_are_given)[0] == {
        "Adam": (True, True),
        "AdamW": (True, True),
        "OwnAdam": (False, True),
        "moved": (False, True),
        "not said": (False, True),
    }


def test_a_gradient_that_lies_otherwise_than_its_parameter_is_clipped(four: GlooWorkers) -> None:
    assert four.run(clipped_elsewhere) == [True] * 4


def test_a_step_that_fails_leaves_an_optimizer_with_its_own_parameters(four: GlooWorkers) -> None:
    assert four.run(state_after_failure) == [True] * 4


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_the_norm_counts_a_weight_once_and_both_copies_are_scaled_by_it():
    first, other, second = with_gradient(3.0), with_gradient(4.0), with_gradient(3.0)
    norm = clip_gradients(
        [first, other, second], 1.0, second_copies=[second], pp_mesh=None, ep_enabled=False
    )
    assert norm.item() == pytest.approx(5.0)
    assert first.grad is not None
    assert first.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert second.grad is not None
    assert torch.equal(first.grad, second.grad)


def test_without_second_copies_it_is_torchtitans():
    ours, theirs = with_gradient(3.0, 4.0), with_gradient(3.0, 4.0)
    norm = clip_gradients([ours], 1.0, second_copies=[], pp_mesh=None, ep_enabled=False)
    assert torch.equal(norm, nn.utils.clip_grad_norm_([theirs], 1.0, foreach=True))
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_a_rank_with_a_second_copy_alone_adds_nothing_to_the_norm():
    second = with_gradient(3.0)
    norm = clip_gradients([second], 1.0, second_copies=[second], pp_mesh=None, ep_enabled=False)
    assert norm.item() == 0
    assert second.grad is not None
    assert second.grad.item() == 3
