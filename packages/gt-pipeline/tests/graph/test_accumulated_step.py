"""Microbatches of a step that gather and reduce once: the bits of one reduction, and the graphs."""

from __future__ import annotations

import pytest
from accumulated_steps import train_like_eager

from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_losses_and_gradients_are_those_of_one_reduction_a_step(
    num_microbatches: int, two: GlooWorkers
) -> None:
    for differing, collectives in two.run(train_like_eager, num_microbatches):
        assert differing == []
        print(collectives)
