"""Roofline times against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gt_passes.simulation import MatmulShape, OpWork, device_time, h100_sxm
from gt_passes.simulation.compute_model import matmul_us

H100 = h100_sxm()
BF16 = torch.bfloat16
HBM = 3.35e12 * 0.9
RATE = 989.4e12 * 0.75


def test_matmul_of_full_waves_runs_at_the_achievable_rate():
    """12 x 11 tiles of 128 x 256 are one full wave on 132 multiprocessors."""
    shape = MatmulShape(12 * 128, 11 * 256, 4096)
    assert matmul_us(shape, BF16, H100) == pytest.approx(1e6 * shape.flops / RATE)


def test_one_tile_more_than_a_wave_costs_another_wave():
    full = matmul_us(MatmulShape(132 * 128, 256, 4096), BF16, H100)
    assert matmul_us(MatmulShape(132 * 128 + 1, 256, 4096), BF16, H100) > 1.2 * full


def test_a_product_of_few_tiles_is_split_along_k():
    """Four tiles of 64 x 128 with k = 16,384 become 64 pieces with k = 1,024, all at once."""
    shape = MatmulShape(128, 256, 16384)
    tile_us = 1e6 * 2 * 64 * 128 * 1024 / (RATE / 132 * 0.65)
    assert matmul_us(shape, BF16, H100) == pytest.approx(tile_us)


def test_a_product_of_nothing_takes_no_arithmetic():
    assert matmul_us(MatmulShape(0, 256, 4096), BF16, H100) == 0


def test_precision_sets_the_peak():
    shape = MatmulShape(4096, 4096, 4096)
    bf16 = matmul_us(shape, BF16, H100)
    assert matmul_us(shape, torch.float32, H100) == pytest.approx(bf16 * 989.4 / 66.9)
    in_float8 = bf16 * 989.4 / 1978.9 * H100.matmul_efficiency / H100.matmul_fp8_efficiency
    assert matmul_us(shape, torch.float8_e4m3fn, H100) == pytest.approx(in_float8)
    assert bf16 / 2 < in_float8 < bf16


def test_memory_bound_work_takes_its_bytes_and_a_kernel():
    work = OpWork(kind="streaming", moved_bytes=3 * 2**30)
    expected = 2.0 + 1e6 * 3 * 2**30 / HBM
    assert device_time(work, H100).total_us == pytest.approx(expected)


def test_gathers_run_at_half_the_bandwidth():
    work = OpWork(kind="irregular", moved_bytes=2**30)
    assert device_time(work, H100).total_us == pytest.approx(2.0 + 1e6 * 2**30 / 3.35e12 / 0.5)


def test_the_longer_of_arithmetic_and_memory_decides():
    thin = MatmulShape(16384, 64, 64)
    moved = 2 * (16384 * 64 + 64 * 64 + 16384 * 64)
    work = OpWork(kind="matmul", matmul=thin, flops=thin.flops, dtype=BF16, moved_bytes=moved)
    time = device_time(work, H100)
    assert time.total_us == pytest.approx(2.0 + max(time.compute_us, time.memory_us))
    assert time.memory_us == pytest.approx(1e6 * moved / HBM)


def test_a_mask_halves_attention():
    work = OpWork(kind="attention_forward", flops=10**12, dtype=BF16)
    whole = device_time(work, H100).compute_us
    assert whole == pytest.approx(1e6 * 1e12 / (989.4e12 * 0.34))
    assert device_time(work, H100, masked=True).compute_us == pytest.approx(whole / 2)


@pytest.mark.parametrize("kind", ["none", "view", "wait", "host_scalar"])
def test_what_launches_no_kernel_takes_no_time_on_the_device(kind):
    assert device_time(OpWork(kind=kind), H100).total_us == 0


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 8))
def test_no_product_beats_the_achievable_rate(m, n, k, batch):
    shape = MatmulShape(m, n, k, batch)
    assert matmul_us(shape, BF16, H100) >= 0.999 * 1e6 * shape.flops / RATE


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_a_larger_product_never_takes_less_than_half(m, n, k):
    """Tilings differ by shape, so that the time may dip a little; it must not collapse."""
    small = matmul_us(MatmulShape(m, n, k), BF16, H100)
    assert matmul_us(MatmulShape(m + 1, n + 1, k + 1), BF16, H100) > 0.5 * small
