"""What travels back between stages for activations that are DTensors."""

from __future__ import annotations

import pytest
import torch
from placed_activations import summed_gradients

from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize("partial_kind", ["sum", "avg"])
def test_the_gradient_of_a_whole_activation_travels_in_parts_of_its_sum(
    partial_kind: str, two: GlooWorkers
):
    expected = torch.arange(8.0).reshape(4, 2)
    for results in two.run(summed_gradients, partial_kind):
        assert len(results) == 4
        assert all(torch.equal(each, expected) for each in results)
