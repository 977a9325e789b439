"""How long one operator takes on one device: a roofline with waves of tiles.

An operator takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed
time for each kernel. Williams, Waterman, Patterson, *Roofline* (CACM 2009). Matrix products run as
tiles, one tile to a multiprocessor at a time; the last wave is charged in full although it may be
partly empty (NVIDIA, *Matrix Multiplication Background User's Guide*).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gt_passes.simulation.beside import DeviceParts
from gt_passes.simulation.hardware import Hardware
from gt_passes.simulation.work import MatmulShape, OpWork


class _Tile(NamedTuple):
    m: int
    n: int
    relative_speed: float
    """The part of the largest tiles' rate that is reached: smaller ones read more a product."""


def _tiles(hardware: Hardware) -> tuple[_Tile, ...]:
    return (
        _Tile(128, 256, 1.0),
        _Tile(256, 128, 1.0),
        _Tile(128, 128, hardware.tile_128x128_relative_speed),
        _Tile(64, 128, hardware.tile_64x128_relative_speed),
    )


class DeviceTime(NamedTuple):
    """How long a device is busy with one operator, and what decides it. Microseconds."""

    total_us: float
    compute_us: float
    memory_us: float

    @property
    def parts(self) -> DeviceParts:
        """For how long multiprocessors and memory are busy."""
        return DeviceParts(self.compute_us, self.memory_us)


def device_time(work: OpWork, hardware: Hardware, *, masked: bool = False) -> DeviceTime:
    """The time on the device, without that of the host.

    Args:
        work: what there is to do; not a collective.
        hardware: the machine.
        masked: whether an attention skips pairs (``is_masked``): then the machine's assumed
            ``attention_mask_density`` counts.
    """
    if work.kind in ("none", "view", "wait", "host_scalar"):
        return DeviceTime(0.0, 0.0, 0.0)
    compute_us = _compute_us(work, hardware, masked=masked)
    memory_us = 1e6 * work.moved_bytes / _bytes_per_s(work, hardware)
    return DeviceTime(max(compute_us, memory_us) + hardware.kernel_fixed_us, compute_us, memory_us)


def matmul_us(
    shape: MatmulShape, dtype: torch.dtype, hardware: Hardware, *, efficiency: float | None = None
) -> float:
    """The arithmetic of a matrix product with the best of a few tilings, without its memory.

    time = waves * (time of one tile at full rate), waves = ceil(tiles / multiprocessors).

    Args:
        shape: what is multiplied.
        dtype: of the arguments.
        hardware: the machine.
        efficiency: of peak with every wave full; None takes the machine's for this dtype. Grouped
            products bring theirs, one for all dtypes: none was measured in 8 bits.
    """
    if shape.flops == 0:
        return 0.0
    if efficiency is None:
        in_8_bits = dtype.itemsize == 1
        efficiency = hardware.matmul_fp8_efficiency if in_8_bits else hardware.matmul_efficiency
    rate = _peak_flops_per_s(dtype, hardware) * efficiency
    return min(_tiled_us(shape, tile, rate, hardware) for tile in _tiles(hardware))


def _tiled_us(shape: MatmulShape, tile: _Tile, flops_per_s: float, hardware: Hardware) -> float:
    num_sms = hardware.num_sms
    num_tiles = shape.batch * math.ceil(shape.m / tile.m) * math.ceil(shape.n / tile.n)
    splits = max(1, min(num_sms // num_tiles, shape.k // hardware.matmul_min_split_k))
    waves = math.ceil(num_tiles * splits / num_sms)
    tile_flops = 2 * tile.m * tile.n * math.ceil(shape.k / splits)
    return 1e6 * waves * tile_flops / (flops_per_s / num_sms * tile.relative_speed)


def _compute_us(work: OpWork, hardware: Hardware, *, masked: bool) -> float:
    if work.dtype is None:
        return 0.0
    if work.matmul is not None:
        grouped = work.kind == "grouped_matmul"
        efficiency = hardware.grouped_matmul_efficiency if grouped else None
        return matmul_us(work.matmul, work.dtype, hardware, efficiency=efficiency)
    forward = work.kind == "attention_forward"
    efficiency = (
        hardware.attention_forward_efficiency if forward else hardware.attention_backward_efficiency
    )
    density = hardware.attention_mask_density if masked else 1.0
    return 1e6 * work.flops * density / (_peak_flops_per_s(work.dtype, hardware) * efficiency)


def _bytes_per_s(work: OpWork, hardware: Hardware) -> float:
    if work.kind == "host_copy":
        return hardware.pcie_bytes_per_s * hardware.pcie_efficiency
    if work.kind == "irregular":
        return hardware.hbm_bytes_per_s * hardware.hbm_irregular_efficiency
    return hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency


def _peak_flops_per_s(dtype: torch.dtype, hardware: Hardware) -> float:
    if dtype in (torch.bfloat16, torch.float16):
        return hardware.peak_bf16_flops_per_s
    if dtype.itemsize == 1:
        return hardware.peak_fp8_flops_per_s
    if dtype in (torch.float64, torch.complex128):
        return hardware.peak_fp64_flops_per_s
    return hardware.peak_fp32_flops_per_s
