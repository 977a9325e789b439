"""Tokens per second, MFU, and the time of the optimizer."""

from __future__ import annotations

import pytest

from gt_passes.simulation import (
    h100_sxm,
    model_flops_utilization,
    optimizer_step_us,
    tokens_per_second_per_gpu,
)


def test_tokens_are_shared_out_among_gpus():
    assert tokens_per_second_per_gpu(2e6, tokens=64_000, num_gpus=32) == 1000


def test_mfu_is_relative_to_the_bf16_peak():
    assert model_flops_utilization(
        1000, flops_per_token=989.4e9 / 2, hardware=h100_sxm()
    ) == pytest.approx(0.5)


def test_adam_passes_over_ten_arrays_with_clipping_and_seven_without():
    rate = 3.35e12 * 0.9
    assert optimizer_step_us(10**9, h100_sxm()) == pytest.approx(1e6 * 10 * 4e9 / rate)
    unclipped = optimizer_step_us(10**9, h100_sxm(), clips_gradients=False)
    assert unclipped == pytest.approx(1e6 * 7 * 4e9 / rate)


def test_refuses_a_step_that_takes_no_time():
    with pytest.raises(ValueError, match="step_us is 0 and num_gpus 8; allowed: numbers above 0"):
        tokens_per_second_per_gpu(0, tokens=1, num_gpus=8)
