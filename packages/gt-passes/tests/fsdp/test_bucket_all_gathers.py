"""What BucketAllGathers gathers together, and what it keeps apart."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from fsdp_graphs import copied_bytes, gathered, of_unknown_effect
from pass_graphs import capture, program, run_pass
from torch.fx import GraphModule, Node

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes import BucketAllGathers, PassContext
from gt_passes._torch_internals import value_of
from gt_passes.analysis.bucket_copies import PACK_BUCKET
from gt_trace import collective_counts
from gt_trace.annotate import phase
from gt_trace.node_metadata import read_annotation

A = torch.ones(2, 4)
B = torch.ones(4)
X = torch.ones(3, 4)


def numbered_block(a, b, x, *, number=0, between=lambda y: y):
    y = x @ gathered(a, f"layers.{number}.a").t()
    return between(y) * gathered(b, f"layers.{number}.b")[:4]


def block(a, b, x):
    return numbered_block(a, b, x)


def launches(graph_module: GraphModule) -> list[Node]:
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    return graph_module.graph.find_nodes(op="call_function", target=target)


def num_all_gathers(graph_module: GraphModule) -> int:
    return collective_counts(graph_module)["all_gather_into_tensor"]


def test_can_gather_a_block_at_once():
    """
    a ── all-gather ── wait ── mm                a ─┐
    b ── all-gather ── wait ─────── mul   =>     b ─┴ pack ── all-gather ── wait ── unpack ── mm, mul
    """
    graph_module = capture(block, A, B, X)
    report = run_pass(BucketAllGathers(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
pack_bucket_default = gt_passes.pack_bucket.default([a_1, b_1], 1, torch.float32)
all_gather_into_tensor_default = _c10d_functional.all_gather_into_tensor.default(pack_bucket_default, 2, fsdp)
wait_tensor_default = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
unpack_bucket_default = gt_passes.unpack_bucket.default(wait_tensor_default, 2, [8, 4])
getitem = getitem(unpack_bucket_default, 0)
view_default = aten.view.default(getitem, [4, 4])
getitem_1 = getitem(unpack_bucket_default, 1)
t = aten.t.default(view_default)
mm = aten.mm.default(x_1, t)
slice_1 = aten.slice.Tensor(getitem_1, 0, 0, 4)
mul = aten.mul.Tensor(mm, slice_1)
return mul
""",
    )
    assert report.counts == {"buckets": 1, "all_gathers_bucketed": 2}
    (launch,) = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )
    assert read_annotation(launch, FsdpCollectiveAnnotation) == FsdpCollectiveAnnotation(
        kind="unshard", parameter_names=("layers.0.a", "layers.0.b"), mesh_axis="fsdp"
    )


def test_what_is_gathered_is_cast_and_copied_once_on_the_way_in_and_once_on_the_way_out():
    """
    a ── to bf16 ── all-gather ── wait ── mm         a ─┐
    b ── to bf16 ── all-gather ── wait ── mul   =>   b ─┴ pack ── all-gather ── wait ── unpack ── ...
    """

    def step(a, b, x):
        y = x @ gathered(a, "layers.0.a", dtype=torch.bfloat16).t()
        return y * gathered(b, "layers.0.b", dtype=torch.bfloat16)[:4]

    graph_module = capture(step, A, B, X.bfloat16())
    run_pass(BucketAllGathers(), graph_module)
    assert not graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    )
    shards, ranks = A.numel() + B.numel(), 2
    assert copied_bytes(graph_module) == shards * (4 + 2) + ranks * shards * (2 + 2)
    launch = launches(graph_module)[0]
    assert value_of(launch).dtype == torch.bfloat16


def test_a_cast_that_others_read_is_made_and_packed():
    def step(a, b, x):
        low = a.to(torch.bfloat16)
        y = x @ gathered(low, "layers.0.a").t() + low.sum()
        return y * gathered(b.bfloat16(), "layers.0.b")[:4]

    graph_module = capture(step, A, B, X.bfloat16())
    run_pass(BucketAllGathers(), graph_module)
    (cast,) = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    )
    (packed,) = graph_module.graph.find_nodes(op="call_function", target=PACK_BUCKET)
    assert [source.name for source in packed.args[0]] == [cast.name, "b_1"]


def test_a_shard_that_does_not_lie_in_order_is_cast_before_it_is_packed():
    def step(a, b, x):
        y = x @ gathered(a.t().to(torch.bfloat16).contiguous(), "layers.0.a")
        return y, gathered(b.to(torch.bfloat16), "layers.0.b")

    graph_module = capture(step, torch.ones(2, 4), B, torch.ones(3, 8, dtype=torch.bfloat16))
    run_pass(BucketAllGathers(), graph_module)
    (packed,) = graph_module.graph.find_nodes(op="call_function", target=PACK_BUCKET)
    assert [source.name for source in packed.args[0]] == ["clone", "b_1"]


def test_running_again_changes_nothing():
    graph_module = capture(block, A, B, X)
    run_pass(BucketAllGathers(), graph_module)
    before = program(graph_module)
    assert not run_pass(BucketAllGathers(), graph_module).changed
    assert program(graph_module) == before


def test_a_graph_without_fsdp_is_left_alone():
    graph_module = capture(lambda x: x.cos() @ x.t(), X)
    before = program(graph_module)
    assert not run_pass(BucketAllGathers(), graph_module).changed
    assert program(graph_module) == before


def test_cannot_gather_two_blocks_at_once():
    def step(a, b, x):
        return numbered_block(a, b, block(a, b, x), number=1)

    graph_module = capture(step, A, B, X)
    assert run_pass(BucketAllGathers(), graph_module).counts["buckets"] == 2
    assert num_all_gathers(graph_module) == 2


def test_cannot_gather_forward_and_backward_at_once():
    def step(a, b, x):
        y = block(a, b, x)
        with phase("backward"):
            return block(a, b, y)

    graph_module = capture(step, A, B, X)
    assert run_pass(BucketAllGathers(), graph_module).counts["buckets"] == 2


def test_cannot_gather_two_dtypes_at_once():
    graph_module = capture(block, A, B.double(), X)
    assert not run_pass(BucketAllGathers(), graph_module).changed


def test_what_stands_outside_of_blocks_is_gathered_before_and_after_them():
    def step(a, b, x):
        x = x @ gathered(a, "embedding.a").t() * gathered(b, "embedding.b")[:4]
        x = block(a, b, x)
        return x @ gathered(a, "head.a").t() * gathered(b, "norm.b")[:4]

    graph_module = capture(step, A, B, X)
    assert run_pass(BucketAllGathers(), graph_module).counts == {
        "buckets": 3,
        "all_gathers_bucketed": 6,
    }


def test_a_cap_splits_a_block():
    def step(a, b, x):
        return block(a, b, x) * gathered(b, "layers.0.c")[:4]

    mib = 2**20 // 4 // 2  # elements of a shard of which two ranks make one MiB
    graph_module = capture(step, torch.ones(2, 4), torch.ones(mib), X)
    assert run_pass(BucketAllGathers(cap_mib=1), graph_module).counts == {}
    graph_module = capture(step, torch.ones(2, 4), torch.ones(mib), X)
    assert run_pass(BucketAllGathers(cap_mib=2), graph_module).counts == {
        "buckets": 1,
        "all_gathers_bucketed": 2,
    }


def test_nothing_is_gathered_across_an_operator_of_unknown_effect():
    graph_module = capture(
        lambda a, b, x: numbered_block(a, b, x, between=of_unknown_effect), A, B, X
    )
    before = program(graph_module)
    assert not run_pass(BucketAllGathers(), graph_module).changed
    assert program(graph_module) == before


def test_a_parameter_that_is_written_to_is_gathered_where_it_was():
    def step(a, b, x):
        def grow(y):
            b.add_(1)
            return y

        return numbered_block(a, b, x, between=grow)

    graph_module = capture(step, A, B, X)
    report = run_pass(BucketAllGathers(), graph_module)
    assert not report.changed
    assert [str(each) for each in report.refusals] == [
        "all_gather_into_tensor_1: add_ shares memory that is written to"
    ]


def test_a_gathered_value_that_two_waits_read_is_refused():
    graph_module = capture(block, A, B, X)
    launch = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )[0]
    (wait,) = launch.users
    with graph_module.graph.inserting_after(wait):
        second = graph_module.graph.node_copy(wait)
    next(iter(wait.users)).replace_input_with(wait, second)
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = ([output.args[0], wait],)
    report = BucketAllGathers().run(graph_module, PassContext.from_graph(graph_module))
    assert [each.reason for each in report.refusals] == ["its result is not read by one wait alone"]


def test_a_parameter_that_is_written_to_in_place_before_it_is_gathered_is_refused():
    def step(a, b, x):
        y = x @ gathered(a, "layers.0.a").t()
        b.mul_(2)
        return y * gathered(b.view(4), "layers.0.b")[:4]

    graph_module = capture(step, A, B, X)
    before = program(graph_module)
    assert not BucketAllGathers().run(graph_module, PassContext.from_graph(graph_module)).changed
    assert program(graph_module) == before


def gathered_twice(weight, name, first, second):
    return gathered(gathered(weight, name, group=first), name, group=second)


def test_parameters_of_two_axes_have_a_bucket_for_each_axis():
    """
    a ── inner ── mm
    b ── outer ── inner ── mm      =>     b, c ── outer ──┬── mul
    c ── outer ── mul                     a, b ── inner ──┴── mm, mm
    """

    def step(a, b, c, x):
        y = x @ gathered(a, "layers.0.a", group="inner")
        y = y @ gathered_twice(b, "layers.0.b", "outer", "inner")
        return y * gathered(c, "layers.0.c", group="outer")

    graph_module = capture(step, A, torch.ones(1, 4), torch.ones(2), X)
    report = run_pass(BucketAllGathers(), graph_module)
    assert report.counts == {"buckets": 2, "all_gathers_bucketed": 4}
    assert report.refusals == ()
    assert num_all_gathers(graph_module) == 2


def test_cannot_bucket_both_axes_of_parameters_that_are_gathered_in_opposite_orders():
    def step(a, b, x):
        y = x @ gathered_twice(a, "layers.0.a", "outer", "inner")
        return y @ gathered_twice(b, "layers.0.b", "inner", "outer")

    graph_module = capture(step, torch.ones(1, 4), torch.ones(1, 4), X)
    report = run_pass(BucketAllGathers(), graph_module)
    assert report.counts == {"buckets": 1, "all_gathers_bucketed": 2}
    assert [(each.node_name, each.reason) for each in report.refusals] == [
        ("all_gather_into_tensor_1", "it needs all_gather_into_tensor_2")
    ]
    assert num_all_gathers(graph_module) == 3
