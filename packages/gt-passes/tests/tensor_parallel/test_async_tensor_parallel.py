"""Which collectives AsyncTensorParallel fuses with products, and what it says of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from async_tp_cases import (
    Everywhere,
    all_gather,
    feed_forward,
    fuse,
    inputs,
    outputs_plain_and_fused,
    reduce_scatter,
    scaled,
    scaled_by_rows,
    scaled_inputs,
    scaled_outputs_plain_and_fused,
    world,
)
from expecttest import assert_expected_inline
from pass_graphs import capture, program, run_pass, unshard

from gt_passes import AsyncTensorParallel
from gt_trace.testing import GlooWorkers, fake_world

X, W = torch.ones(2, 4, 4), torch.ones(4, 6)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_world(rank=0, world_size=2):
        yield


def refusals(step, *values):
    graph_module = capture(step, *values)
    before = program(graph_module)
    report = fuse(graph_module)
    assert not report.changed
    assert program(graph_module) == before
    return "\n".join(map(str, report.refusals))


def gather(x, dim=1):
    return all_gather(x, dim, world())


def scatter(x, dim=1, op="sum"):
    return reduce_scatter(x, op, dim, world()) + 0


def matmul(x, w):
    return (x.reshape(-1, x.shape[-1]) @ w).view(*x.shape[:-1], -1)


def test_can_fuse_both_directions_for_a_batch_of_one():
    graph_module = capture(feed_forward, *inputs(1))
    report = fuse(graph_module)
    assert report.counts == {"all_gathers_fused": 1, "reduce_scatters_fused": 1}
    assert report.refusals == ()
    assert_expected_inline(
        program(graph_module),
        """\
fused_all_gather_matmul_default = symm_mem.fused_all_gather_matmul.default(x_1, [w1_1, w3_1], 1, 0, return_A=True)
getitem_2 = getitem(fused_all_gather_matmul_default, 1)
getitem_3 = getitem(getitem_2, 0)
view_default = aten.view.default(getitem_3, [8, 6])
getitem_4 = getitem(getitem_2, 1)
view_default_1 = aten.view.default(getitem_4, [8, 6])
getitem_5 = getitem(fused_all_gather_matmul_default, 0)
view_1 = aten.view.default(getitem_5, [-1, 4])
sigmoid = aten.sigmoid.default(view_default)
mul = aten.mul.Tensor(sigmoid, view_default_1)
reshape_default = aten.reshape.default(mul, [1, 8, 6])
fused_matmul_reduce_scatter_default = symm_mem.fused_matmul_reduce_scatter.default(reshape_default, w2_1, sum, 1, 0)
add = aten.add.Tensor(fused_matmul_reduce_scatter_default, 0)
t = aten.t.default(gradient_1)
mm_3 = aten.mm.default(t, view_1)
return [add, mm_3]
""",
    )


def test_can_fuse_with_a_larger_batch_at_the_price_of_copies():
    graph_module = capture(feed_forward, *inputs(2))
    fuse(graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
fused_all_gather_matmul_default = symm_mem.fused_all_gather_matmul.default(x_1, [w1_1, w3_1], 1, 0, return_A=True)
getitem_4 = getitem(fused_all_gather_matmul_default, 1)
getitem_5 = getitem(getitem_4, 0)
clone_default = aten.clone.default(getitem_5, memory_format=torch.contiguous_format)
view_default = aten.view.default(clone_default, [16, 6])
getitem_6 = getitem(getitem_4, 1)
clone_default_1 = aten.clone.default(getitem_6, memory_format=torch.contiguous_format)
view_default_1 = aten.view.default(clone_default_1, [16, 6])
getitem_7 = getitem(fused_all_gather_matmul_default, 0)
clone_default_2 = aten.clone.default(getitem_7, memory_format=torch.contiguous_format)
view = aten.view.default(clone_default_2, [-1, 4])
sigmoid = aten.sigmoid.default(view_default)
mul = aten.mul.Tensor(sigmoid, view_default_1)
reshape_default = aten.reshape.default(mul, [2, 8, 6])
fused_matmul_reduce_scatter_default = symm_mem.fused_matmul_reduce_scatter.default(reshape_default, w2_1, sum, 1, 0)
add = aten.add.Tensor(fused_matmul_reduce_scatter_default, 0)
t = aten.t.default(gradient_1)
mm_3 = aten.mm.default(t, view)
return [add, mm_3]
""",
    )


def test_the_gathered_value_is_not_returned_when_only_products_read_it():
    graph_module = capture(lambda x, w: matmul(gather(x), w), X, W)
    fuse(graph_module)
    (fused,) = graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.symm_mem.fused_all_gather_matmul.default
    )
    assert fused.kwargs == {"return_A": False}


def test_a_graph_without_tensor_parallelism_stays_as_it_is():
    assert refusals(lambda x: x.sin(), X) == ""


def test_running_again_changes_nothing():
    graph_module = capture(feed_forward, *inputs(2))
    fuse(graph_module)
    before = program(graph_module)
    assert not fuse(graph_module).changed
    assert program(graph_module) == before


def test_cannot_fuse_without_symmetric_memory():
    graph_module = capture(feed_forward, *inputs(1))
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    report = run_pass(AsyncTensorParallel(), graph_module)
    assert not report.changed
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """\
all_gather_into_tensor: this machine has no CUDA
reduce_scatter_tensor: this machine has no CUDA""",
    )


def test_cannot_fuse_what_no_product_reads():
    assert_expected_inline(
        refusals(lambda x: (gather(x).sin(), scatter(x.cos())), X),
        """\
all_gather_into_tensor: no matrix product reads what it gathers
reduce_scatter_tensor: what it scatters is not a matrix product""",
    )


def test_cannot_fuse_along_the_dim_of_the_sum():
    def step(x, w, v):
        return matmul(gather(x, 2), w), scatter(matmul(x, v), 2)

    assert_expected_inline(
        refusals(step, X, torch.ones(8, 6), torch.ones(4, 6)),
        """\
all_gather_into_tensor: it gathers dim 2, over which the product sums
reduce_scatter_tensor: it scatters dim 2, the last of the product""",
    )


def test_cannot_fuse_a_product_whose_other_operand_comes_later():
    def step(x, w):
        gathered = gather(x)
        y = gathered.sin()
        return y, matmul(gathered, w + 1)

    assert_expected_inline(
        refusals(step, X, W),
        """all_gather_into_tensor: the other operand of the product is made after the gathered one is read""",
    )


def test_can_fuse_a_product_whose_other_operand_is_transposed_later():
    def step(x, w):
        gathered = gather(x)
        y = gathered.sin()
        return y, matmul(gathered, w.t())

    graph_module = capture(step, X, torch.ones(6, 4))
    assert fuse(graph_module).counts == {"all_gathers_fused": 1}
    names = [node.name for node in graph_module.graph.nodes]
    assert names.index("t") < names.index("fused_all_gather_matmul_default") < names.index("sin")


def test_cannot_fuse_a_product_that_others_read():
    def step(x, w):
        product = matmul(x, w)
        return scatter(product), product.sin()

    assert_expected_inline(
        refusals(step, X, W), """reduce_scatter_tensor: others than the reduce-scatter read mm"""
    )


def test_cannot_fuse_another_reduction():
    assert_expected_inline(
        refusals(lambda x, w: scatter(matmul(x, w), op="max"), X, W),
        """reduce_scatter_tensor: it reduces by 'max', and the fused operator by sum or avg""",
    )


def test_cannot_fuse_memory_that_is_written_to():
    def step(x, w):
        x.add_(1)
        return matmul(gather(x), w), scatter(matmul(x, w))

    assert_expected_inline(
        refusals(step, X, W),
        """\
all_gather_into_tensor: what it gathers, or the result, is written to
reduce_scatter_tensor: the product, or an operand of it, is written to""",
    )


def test_cannot_fuse_across_an_unknown_operator():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("log(Tensor x) -> Tensor")
        library.impl("log", lambda x: x.clone(), "CompositeExplicitAutograd")

        def step(x, w):
            gathered = gather(x)
            product = matmul(x, w)
            torch.ops.gt_passes_test.log(x)
            return matmul(gathered, w), scatter(product), torch.ops.gt_passes_test.log(w)

        assert_expected_inline(
            refusals(step, X, W),
            """\
all_gather_into_tensor: mm_1 reads it behind an operator of which nothing is known
reduce_scatter_tensor: mm is made before an operator of which nothing is known""",
        )


def test_fsdp_keeps_its_collectives():
    def step(x, w):
        return x.view(-1, 4) @ unshard(w, group=world(), num_ranks=2)

    assert refusals(step, X, torch.ones(2, 6)) == ""


@pytest.fixture(scope="module")
def two() -> Iterator[GlooWorkers]:
    with GlooWorkers(2) as workers:
        yield workers


def test_what_is_fused_means_the_same_on_two_ranks(two):
    for cases in two.run(outputs_plain_and_fused):
        for plain, fused in cases:
            for expected, got in zip(plain, fused, strict=True):
                assert expected.stride() == got.stride()
                torch.testing.assert_close(expected, got, rtol=1e-5, atol=1e-5)


def test_what_is_fused_in_8_bits_has_the_same_bits_on_two_ranks(two):
    try:
        scaled_by_rows(*scaled_inputs())
    except RuntimeError as error:
        if "only supports per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("this PyTorch scales rows on no CPU")
    for cases in two.run(scaled_outputs_plain_and_fused):
        assert [torch.equal(plain, fused) for plain, fused in cases] == [True, True]
        assert all(plain.abs().max() > 1 for plain, _ in cases)


def test_can_fuse_a_scattered_product_in_8_bits():
    graph_module = capture(scaled_by_rows, *scaled_inputs())
    report = fuse(graph_module)
    assert report.counts == {"reduce_scatters_fused": 1}
    assert report.refusals == ()
    assert_expected_inline(
        "\n".join(program(graph_module).splitlines()[-5:]),
        """\
reshape_default = aten.reshape.default(_to_copy, [2, 8, 32])
reshape_default_1 = aten.reshape.default(div, [2, 8, 1])
fused_scaled_matmul_reduce_scatter_default = symm_mem.fused_scaled_matmul_reduce_scatter.default(reshape_default, t_1, reshape_default_1, div_1, sum, 1, 1, 0, [2, 8, 16], out_dtype=torch.bfloat16, use_fast_accum=False)
add = aten.add.Tensor(fused_scaled_matmul_reduce_scatter_default, 0)
return add""",
    )


def test_cannot_fuse_a_product_in_8_bits_with_a_bias_or_scattered_along_a_later_dim():
    def step(x, w, bias):
        deep = x.view(1, *x.shape)
        return (
            scaled(x, w, scales_of_rows=False, bias=bias),
            scaled(deep, w, scales_of_rows=False, dim=2),
        )

    assert_expected_inline(
        refusals(step, *scaled_inputs(), torch.ones(16, dtype=torch.bfloat16)),
        """\
reduce_scatter_tensor: its product in 8 bits has a bias or a scale of the result
reduce_scatter_tensor_1: it scatters dim 2 of a product in 8 bits""",
    )


def test_symmetric_memory_is_asked_for_by_group():
    class NotHere(Everywhere):
        def reason_against(self, group_name):
            return f"no symmetric memory in group {group_name!r}"

    graph_module = capture(lambda x, w: matmul(gather(x), w), X, W)
    report = run_pass(AsyncTensorParallel(symmetric_memory=NotHere()), graph_module)
    (refusal,) = report.refusals
    assert refusal.reason == f"no symmetric memory in group {world()!r}"
