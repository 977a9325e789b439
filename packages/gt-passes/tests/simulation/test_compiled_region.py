"""Compiled regions: what is fused reads its inputs once and writes its outputs once."""

from __future__ import annotations

import pytest
import torch
from exchange_graphs import capture_exchange
from pass_graphs import capture, collectives, run_pass

from gt_passes import CompileWholeGraph
from gt_passes.analysis.bucket_copies import PACK_BUCKET
from gt_passes.compilation.inductor_compiler import DescribeOnly
from gt_passes.simulation import CostModel, balanced_exchange_sizes, simulate_step
from gt_passes.simulation.graph_program import FusedKernel, compiled_kernels
from gt_passes.simulation.operands import OperandReader

aten = torch.ops.aten
X = torch.ones(2**20)
W = torch.ones(1024, 1024)


def kernels(fn, *args):
    """What a compiled function runs: bytes of fused kernels, targets of other operators."""
    cost_model = CostModel(ranks_of_group=lambda name: range(2))
    reader = OperandReader(cost_model.sizes)
    found = compiled_kernels(capture(fn, *args), cost_model, reader)
    return [step.moved_bytes if isinstance(step, FusedKernel) else step.target for step in found]


def test_neighbouring_operators_are_one_kernel():
    # Reads x, writes the result; what is in between stays in registers.
    assert kernels(lambda x: ((x + 1) * 2).relu(), X) == [2 * 4 * 2**20]


def test_a_value_used_outside_is_written():
    def fn(x):
        y = x + 1
        return y, (y * 2).relu()

    assert kernels(fn, X) == [3 * 4 * 2**20]


def test_an_input_used_twice_is_read_once():
    assert kernels(lambda x: x * x + x.relu(), X) == [2 * 4 * 2**20]


def test_a_matrix_product_ends_the_kernel():
    def fn(x, w):
        return ((x + 1) @ w).relu() * 2

    assert kernels(fn, W, W.clone()) == [8 * 2**20, aten.mm.default, 8 * 2**20]


def test_a_copy_into_a_bucket_is_a_kernel_of_its_own():
    def fn(x, y):
        return PACK_BUCKET([x + 1, y], 1, torch.float32) * 2

    assert kernels(fn, X, X.clone()) == [8 * 2**20, PACK_BUCKET, 16 * 2**20]


def test_a_collective_ends_the_kernel():
    def fn(x):
        gathered = collectives.all_gather_into_tensor(x + 1, 2, "tp")
        y = x * 2
        return collectives.wait_tensor(gathered), y * 3

    launch, wait = collectives.all_gather_into_tensor.default, collectives.wait_tensor.default
    assert kernels(fn, X) == [8 * 2**20, launch, 8 * 2**20, wait, 8 * 2**20]


def test_a_view_that_leaves_the_kernel_is_written_as_what_it_views():
    def fn(x, w):
        return (x + 1).t() @ w

    assert kernels(fn, W, W.clone()) == [8 * 2**20, aten.mm.default]


def test_a_view_of_what_no_kernel_made_moves_nothing():
    def fn(x, w):
        return (x + 1) @ w.t()

    assert kernels(fn, W, W.clone()) == [8 * 2**20, aten.mm.default]


def test_what_reads_a_number_reduced_over_rows_is_a_kernel_of_its_own():
    def scaled(x):
        y = x + 1
        return y / y.abs().amax()

    # x read, the maximum written; x read again, and x + 1 computed anew.
    assert kernels(scaled, W) == [4 * 2**20 + 4, 8 * 2**20 + 4]


def test_what_is_written_anyway_is_read_and_not_computed_anew():
    def scaled(x):
        y = x + W
        return y, y / y.abs().amax()

    assert kernels(scaled, W.clone()) == [12 * 2**20 + 4, 8 * 2**20 + 4]


def test_a_sum_over_rows_ends_a_kernel_and_one_along_them_does_not():
    assert kernels(lambda x: x - x.sum(1, keepdim=True), W) == [8 * 2**20]
    assert kernels(lambda x: x - x.sum(0, keepdim=True), W) == [4 * 2**20 + 4096, 8 * 2**20 + 4096]
    assert kernels(lambda x: x - x.amax(), X) == [4 * 2**20 + 4, 8 * 2**20 + 4]
    # By the dims that are reduced, not by sizes: here both results have 1,024.
    assert kernels(lambda x: x - x.sum(1), W) == [8 * 2**20]
    assert kernels(lambda x: x - x.sum(0), W) == [4 * 2**20 + 4096, 8 * 2**20 + 4096]


def test_what_is_written_into_an_input_is_moved():
    def added(x, total):
        total.add_(x)
        return x @ x

    def copied(x, kept):
        kept.copy_(x + 1)
        return x * 2

    assert kernels(added, W, W.clone()) == [12 * 2**20, aten.mm.default]
    assert kernels(copied, X, X.clone()) == [12 * 2**20]


def test_complex_numbers_are_not_fused():
    def rotated(x, turn):
        return torch.view_as_real(torch.view_as_complex(x * 2) * turn) + 1

    turn = torch.ones(2**19, dtype=torch.complex64)
    assert kernels(rotated, X.view(-1, 2), turn) == [
        8 * 2**20,
        aten.mul.Tensor,
        aten.view_as_real.default,
        8 * 2**20,
    ]


def test_an_operator_of_which_only_bytes_are_known_is_not_fused():
    with torch.library._scoped_library("gt_simulation_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        target = torch.ops.gt_simulation_test.mystery.default
        assert kernels(lambda x: target(x + 1) * 2, X) == [8 * 2**20, target, 8 * 2**20]


def test_exchanges_inside_a_region_are_balanced_too():
    graph = capture_exchange(rows=64)
    expected = balanced_exchange_sizes(graph)
    run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph)
    assert balanced_exchange_sizes(graph) == expected


def test_a_compiled_graph_is_faster_than_the_captured_one_and_keeps_its_products():
    def step(x, w):
        return (((x + 1) * 2).relu() @ w).sigmoid() * 3

    captured = capture(step, W, W.clone())
    before = simulate_step(captured, CostModel())
    compiled = capture(step, W, W.clone())
    run_pass(CompileWholeGraph(compiler=DescribeOnly()), compiled)
    after = simulate_step(compiled, CostModel())
    assert after.flops == before.flops
    assert after.step_us < before.step_us
    assert len(after.run.nodes) == 3
    assert after.memory.peak_bytes == pytest.approx(before.memory.peak_bytes)
