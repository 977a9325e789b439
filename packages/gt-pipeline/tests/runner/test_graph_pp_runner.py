"""Every schedule on four ranks computes what one process computes, to the bit."""

from __future__ import annotations

import pytest
import torch
from runner_cases import schedule, train_and_evaluate
from toy_pipeline import train_in_one_process

from gt_pipeline.schedules import SCHEDULE_NAMES
from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_losses_and_gradients_equal_those_of_one_process_to_the_bit(
    four: GlooWorkers, name: str
) -> None:
    expected = train_in_one_process(schedule(name).num_stages, num_steps=2)
    by_rank = four.run(train_and_evaluate, name, 2, False)
    losses = [loss for _, trained, _ in by_rank for loss in trained]
    assert torch.equal(torch.stack(losses), torch.stack(expected.losses))
    gradients = {name: each for _, _, of_rank in by_rank for name, each in of_rank.items()}
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected.gradients[name]), name


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_evaluation_works_before_the_first_training_step(four: GlooWorkers, name: str) -> None:
    expected = train_in_one_process(schedule(name).num_stages, num_steps=1)
    by_rank = four.run(train_and_evaluate, name, 0, True)
    losses = [loss for evaluated, _, _ in by_rank for loss in evaluated]
    assert torch.equal(torch.stack(losses), torch.stack(expected.losses))
    assert all(not gradients for _, _, gradients in by_rank)
