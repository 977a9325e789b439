"""What BucketReduceScatters and BucketAllReduces reduce together, and what they keep apart."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from fsdp_graphs import all_reduced, copied_bytes, of_unknown_effect, reduce_scattered
from pass_graphs import capture, program, run_pass

from gt_passes import BucketAllReduces, BucketReduceScatters, PassContext
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_trace import collective_counts

A = torch.ones(4, 4)
B = torch.ones(4)
X = torch.ones(3, 4)
UNARY = [(BucketReduceScatters, reduce_scattered), (BucketAllReduces, all_reduced)]


def step(a, b, x):
    first = reduce_scattered(x.t() @ x * a, "layers.0.a")
    return first, reduce_scattered(b * x.sum(0), "layers.0.b")


def test_can_reduce_and_scatter_a_block_at_once():
    """
    a ── reduce-scatter ── wait ── div        a ─┐
    b ── reduce-scatter ── wait ── div   =>   b ─┴ pack ── reduce-scatter ── wait ── split ── div, div
    """
    graph_module = capture(step, A, B, X)
    report = run_pass(BucketReduceScatters(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
t = aten.t.default(x_1)
mm = aten.mm.default(t, x_1)
mul = aten.mul.Tensor(mm, a_1)
sum_1 = aten.sum.dim_IntList(x_1, [0])
mul_1 = aten.mul.Tensor(b_1, sum_1)
pack_bucket_default = gt_passes.pack_bucket.default([mul, mul_1], 2, torch.float32)
reduce_scatter_tensor_default = _c10d_functional.reduce_scatter_tensor.default(pack_bucket_default, sum, 2, fsdp)
wait_tensor_default = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
split_with_sizes_default = aten.split_with_sizes.default(wait_tensor_default, [8, 2])
getitem = getitem(split_with_sizes_default, 0)
view_default = aten.view.default(getitem, [2, 4])
getitem_1 = getitem(split_with_sizes_default, 1)
div = aten.div.Tensor(view_default, 2)
div_1 = aten.div.Tensor(getitem_1, 2)
return [div, div_1]
""",
    )
    assert report.counts == {"buckets": 1, "reductions_bucketed": 2}


def test_gradients_are_cast_and_copied_once():
    """
    a ── to f32 ── reduce-scatter ── wait ── div       a ─┐
    b ── to f32 ── reduce-scatter ── wait ── div  =>   b ─┴ pack ── reduce-scatter ── wait ── split ── ...
    """

    def step(a, b, x):
        first = reduce_scattered(x.t() @ x * a, "layers.0.a", dtype=torch.float32)
        return first, reduce_scattered(b * x.sum(0), "layers.0.b", dtype=torch.float32)

    graph_module = capture(step, A.bfloat16(), B.bfloat16(), X.bfloat16())
    run_pass(BucketReduceScatters(), graph_module)
    assert not graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    )
    assert copied_bytes(graph_module) == (A.numel() + B.numel()) * (2 + 4)


def test_gradients_that_leave_the_step_as_they_come_back_have_memory_of_their_own():
    def step(a, b, x):
        first = all_reduced(a * x[0], "layers.0.a")
        return first, all_reduced(b * x[1], "layers.0.b")

    graph_module = capture(step, A, B, X)
    run_pass(BucketAllReduces(), graph_module)
    (unpacked,) = graph_module.graph.find_nodes(op="call_function", target=UNPACK_BUCKET)
    assert unpacked.args[1:] == (1, [16, 4])


def test_a_gradient_that_is_overwritten_before_the_bucket_is_cast_where_it_was():
    def step(a, b, x):
        gradient = x.t() @ x * a
        first = reduce_scattered(gradient, "layers.0.a", dtype=torch.float32)
        gradient.mul_(2)
        return first, reduce_scattered(b * x.sum(0), "layers.0.b", dtype=torch.float32), gradient

    graph_module = capture(step, A.bfloat16(), B.bfloat16(), X.bfloat16())
    assert run_pass(BucketReduceScatters(), graph_module).changed
    (packed,) = graph_module.graph.find_nodes(op="call_function", target=PACK_BUCKET)
    assert [source.name for source in packed.args[0]] == ["_to_copy", "mul_1"]


def test_can_all_reduce_a_block_at_once():
    def step(a, b, x):
        return all_reduced(a * x[0], "layers.0.a"), all_reduced(b * x[1], "layers.0.b")

    graph_module = capture(step, A, B, X)
    run_pass(BucketAllReduces(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
select = aten.select.int(x_1, 0, 0)
mul = aten.mul.Tensor(a_1, select)
select_1 = aten.select.int(x_1, 0, 1)
mul_1 = aten.mul.Tensor(b_1, select_1)
pack_bucket_default = gt_passes.pack_bucket.default([mul, mul_1], 1, torch.float32)
all_reduce_default = _c10d_functional.all_reduce.default(pack_bucket_default, sum, fsdp)
wait_tensor_default = _c10d_functional.wait_tensor.default(all_reduce_default)
unpack_bucket_default = gt_passes.unpack_bucket.default(wait_tensor_default, 1, [16, 4])
getitem = getitem(unpack_bucket_default, 0)
view_default = aten.view.default(getitem, [4, 4])
getitem_1 = getitem(unpack_bucket_default, 1)
return [view_default, getitem_1]
""",
    )


@pytest.mark.parametrize(("bucketing", "reduced"), UNARY)
def test_running_again_changes_nothing(bucketing, reduced):
    def step(a, b, x):
        return reduced(a * x[0], "layers.0.a"), reduced(b * x[1], "layers.0.b")

    graph_module = capture(step, A, B, X)
    assert run_pass(bucketing(), graph_module).changed
    before = program(graph_module)
    assert not run_pass(bucketing(), graph_module).changed
    assert program(graph_module) == before


@pytest.mark.parametrize(("bucketing", "reduced"), UNARY)
def test_a_graph_without_fsdp_is_left_alone(bucketing, reduced):
    graph_module = capture(lambda x: x.cos() @ x.t(), X)
    before = program(graph_module)
    assert not run_pass(bucketing(), graph_module).changed
    assert program(graph_module) == before


@pytest.mark.parametrize(("bucketing", "reduced"), UNARY)
def test_nothing_is_reduced_across_an_operator_of_unknown_effect(bucketing, reduced):
    def step(a, b, x):
        first = reduced(a * x[0], "layers.0.a")
        return first, reduced(b * of_unknown_effect(x)[1], "layers.0.b")

    graph_module = capture(step, A, B, X)
    before = program(graph_module)
    assert not run_pass(bucketing(), graph_module).changed
    assert program(graph_module) == before


def test_a_reduced_gradient_that_is_written_before_the_last_is_refused():
    def step(a, b, x):
        first = reduce_scattered(a * x[0], "layers.0.a")
        first.add_(1)
        return first, reduce_scattered(b * x[1], "layers.0.b")

    graph_module = capture(step, A, B, X)
    before = program(graph_module)
    report = run_pass(BucketReduceScatters(), graph_module)
    assert not report.changed
    assert program(graph_module) == before
    assert [str(each) for each in report.refusals] == [
        "reduce_scatter_tensor: div shares memory that is written to"
    ]


def test_what_reads_an_early_gradient_moves_behind_the_bucket():
    def step(a, b, x):
        first = reduce_scattered(a * x[0], "layers.0.a")
        doubled = first * 2
        second = reduce_scattered(b * x[1], "layers.0.b")
        return doubled + first, second

    graph_module = capture(step, A, B, X)
    assert run_pass(BucketReduceScatters(), graph_module).counts["buckets"] == 1
    names = [node.name for node in graph_module.graph.nodes]
    assert names.index("reduce_scatter_tensor_default") < names.index("mul_1")


def test_two_reductions_are_not_one():
    def step(a, b, x):
        mean = torch.ops._c10d_functional.all_reduce(b * x[1], "avg", "fsdp")
        return all_reduced(a * x[0], "layers.0.a"), torch.ops._c10d_functional.wait_tensor(mean)

    graph_module = capture(step, A, B, X)
    assert not run_pass(BucketAllReduces(), graph_module).changed
    assert collective_counts(graph_module) == {"all_reduce": 2}


def test_a_gradient_that_is_overwritten_after_it_is_reduced_is_refused():
    def step(a, b, x):
        gradient = a * x[0]
        first = reduce_scattered(gradient, "layers.0.a")
        gradient.mul_(2)
        return first, reduce_scattered(b * x[1], "layers.0.b"), gradient

    graph_module = capture(step, A, B, X)
    before = program(graph_module)
    report = BucketReduceScatters().run(graph_module, PassContext.from_graph(graph_module))
    assert not report.changed
    assert program(graph_module) == before
    assert [each.reason for each in report.refusals] == ["mul shares memory that is written to"]


def reduced_twice(gradient, name, first, second):
    return reduce_scattered(reduce_scattered(gradient, name, group=first), name, group=second)


def test_gradients_of_two_axes_have_a_bucket_for_each_axis():
    def step(a, b, x):
        first = reduce_scattered(a * x[0], "layers.0.a", group="inner")
        second = reduced_twice(a * x[1], "layers.0.b", "inner", "outer")
        return first, second, reduce_scattered(b * x[2], "layers.0.c", group="outer")

    graph_module = capture(step, A, B, X)
    report = run_pass(BucketReduceScatters(), graph_module)
    assert report.counts == {"buckets": 2, "reductions_bucketed": 4}
    assert report.refusals == ()
    assert collective_counts(graph_module)["reduce_scatter_tensor"] == 2


def test_cannot_bucket_both_axes_of_gradients_that_are_reduced_in_opposite_orders():
    def step(a, x):
        first = reduced_twice(a * x[0], "layers.0.a", "inner", "outer")
        return first, reduced_twice(a * x[1], "layers.0.b", "outer", "inner")

    graph_module = capture(step, A, X)
    report = run_pass(BucketReduceScatters(), graph_module)
    assert report.counts == {"buckets": 1, "reductions_bucketed": 2}
    (refusal,) = report.refusals
    assert refusal.reason.endswith(" needs it")
    assert collective_counts(graph_module)["reduce_scatter_tensor"] == 3
