"""What async tensor parallelism takes: the longer of products and copies, and what stands around."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from async_tp_cases import world
from pass_graphs import capture

from gt_passes._torch_compilation_internals import load_symmetric_memory_operators
from gt_passes.simulation import CostModel, Hardware, h100_sxm
from gt_passes.simulation.compute_model import matmul_us
from gt_passes.simulation.cost_model import OpCost
from gt_passes.simulation.work import MatmulShape
from gt_trace.testing import fake_world

load_symmetric_memory_operators()
BF16 = torch.bfloat16
NUM_RANKS = 8


def gathering(x, *weights):
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    return [product * 2 for product in fused(x, list(weights), 0, world(), return_A=False)[1]]


def scattering(x, weight):
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return fused(x, weight, "sum", 0, world()) * 2


def scattering_in_8_bits(x, weight):
    x, weight = x.to(torch.float8_e4m3fn), weight.t().to(torch.float8_e4m3fn).t()
    scale, shape = torch.ones(()), [x.shape[0], weight.shape[1]]
    fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
    return fused(x, weight, scale, scale, "sum", 0, 0, world(), shape, out_dtype=BF16) * 2


def cost_of(step, *shapes: tuple[int, int], hardware: Hardware | None = None) -> OpCost:
    """Of the fused call of a step on operands of these shapes."""
    with fake_world(rank=0, world_size=NUM_RANKS):
        graph = capture(step, *(torch.empty(shape, dtype=BF16) for shape in shapes)).graph
        (node,) = (node for node in graph.nodes if "symm_mem" in str(node.target))
        return CostModel(hardware).cost(node)


# Of Llama 3.1 70B on 8 ranks: 8,192 tokens, width 8,192, 3,584 of 28,672 hidden columns.
GATHERED = ((1024, 8192), (8192, 3584))
SCATTERED = ((8192, 3584), (3584, 8192))
WHOLE_US = matmul_us(MatmulShape(8192, 3584, 8192), BF16, h100_sxm())


@pytest.mark.parametrize(("step", "shapes"), [(gathering, GATHERED), (scattering, SCATTERED)])
def test_copies_hide_behind_large_products(step, shapes):
    """The product and its launches in parts, a barrier or two, and a copy or sum of 16 to 151 MB."""
    cost = cost_of(step, *shapes)
    assert cost.kind == "matmul"
    assert cost.bound == "compute"
    assert cost.flops == 2 * 8192 * 8192 * 3584
    assert cost.needs is not None
    assert cost.needs.compute == pytest.approx(WHOLE_US)  # no launches, which nothing stretches
    assert cost.needs.memory < WHOLE_US
    assert WHOLE_US < cost.duration_us < WHOLE_US + 100


@pytest.mark.parametrize(("step", "shapes"), [(gathering, GATHERED), (scattering, SCATTERED)])
def test_a_slow_link_decides_how_long_it_takes(step, shapes):
    slow = replace(h100_sxm(), nvlink_bus_bytes_per_s=1e10)
    cost = cost_of(step, *shapes, hardware=slow)
    assert (cost.bound, cost.needs) == ("network", None)
    copies_us = 1e6 * (NUM_RANKS - 1) * 1024 * 8192 * 2 / 1e10
    # One part of the product is hidden by no copy.
    assert copies_us + WHOLE_US / NUM_RANKS < cost.duration_us < copies_us + WHOLE_US


def test_products_that_read_one_activation_share_its_copies():
    slow = replace(h100_sxm(), nvlink_bus_bytes_per_s=1e10)
    one = cost_of(gathering, *GATHERED, hardware=slow)
    two = cost_of(gathering, *GATHERED, GATHERED[1], hardware=slow)
    assert two.flops == 2 * one.flops
    more_us = two.duration_us - one.duration_us
    assert more_us == pytest.approx(WHOLE_US / NUM_RANKS + h100_sxm().kernel_fixed_us)


def test_products_in_8_bits_take_half_the_time_and_send_as_much():
    plain, scaled = cost_of(scattering, *SCATTERED), cost_of(scattering_in_8_bits, *SCATTERED)
    assert plain.flops == scaled.flops
    whole_us = matmul_us(MatmulShape(8192, 3584, 8192), torch.float8_e4m3fn, h100_sxm())
    assert plain.duration_us - scaled.duration_us == pytest.approx(WHOLE_US - whole_us, rel=0.3)


def test_products_that_read_their_weight_for_each_part_keep_memory_busy():
    cost = cost_of(gathering, (8, 8192), (8192, 8192))
    moved = 2 * (64 * 8192 + NUM_RANKS * 8192 * 8192 + 64 * 8192)
    rate = h100_sxm().hbm_bytes_per_s * h100_sxm().hbm_streaming_efficiency
    product_us = matmul_us(MatmulShape(64, 8192, 8192), BF16, h100_sxm())
    assert cost.needs == pytest.approx((product_us, 1e6 * moved / rate))
