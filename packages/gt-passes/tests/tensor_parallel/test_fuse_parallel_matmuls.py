"""Which products FuseParallelMatmuls makes one, and that they stay what they were."""

from __future__ import annotations

import copy

import torch
from expecttest import assert_expected_inline
from inductor_cases import relative_difference
from pass_graphs import capture, program, run_pass

from gt_passes import FuseParallelMatmuls
from gt_trace.annotate import phase

torch.manual_seed(0)
X, W1, W3 = torch.randn(2, 4, 8), torch.randn(6, 8), torch.randn(5, 8)


def gated(x, w1, w3):
    return (x.view(-1, 8) @ w1.t()).sigmoid(), x.view(-1, 8) @ w3.t()


def refusals(step, *values, **options):
    graph_module = capture(step, *values)
    before = program(graph_module)
    report = run_pass(FuseParallelMatmuls(**options), graph_module)
    assert not report.changed
    assert program(graph_module) == before
    return "\n".join(map(str, report.refusals))


def test_products_of_one_left_operand_become_one():
    graph_module = capture(gated, X, W1, W3)
    reference = copy.deepcopy(graph_module)
    report = run_pass(FuseParallelMatmuls(), graph_module)
    assert report.counts == {"products": 2, "fused_into": 1}
    assert_expected_inline(
        program(graph_module),
        """\
view = aten.view.default(x_1, [-1, 8])
t = aten.t.default(w1_1)
t_1 = aten.t.default(w3_1)
cat_default = aten.cat.default([t, t_1], 1)
mm_default = aten.mm.default(view, cat_default)
slice_tensor = aten.slice.Tensor(mm_default, 1, 0, 6)
slice_tensor_1 = aten.slice.Tensor(mm_default, 1, 6, 11)
clone_default = aten.clone.default(slice_tensor_1, memory_format=torch.contiguous_format)
sigmoid = aten.sigmoid.default(slice_tensor)
view_1 = aten.view.default(x_1, [-1, 8])
return [sigmoid, clone_default]
""",
    )
    for expected, got in zip(reference(X, W1, W3), graph_module(X, W1, W3), strict=True):
        assert expected.stride() == got.stride()
        assert relative_difference(expected, got) <= 1e-5


def test_parts_are_copied_only_for_those_who_cannot_read_them_with_gaps():
    def step(x, w1, w3):
        hidden = (x.view(-1, 8) @ w1.t()).view(2, 4, 6)
        kept = (x.view(-1, 8) @ w3.t()).view(-1)
        return hidden.sigmoid(), kept.sigmoid()

    graph_module = capture(step, X, W1, W3)
    reference = copy.deepcopy(graph_module)
    run_pass(FuseParallelMatmuls(), graph_module)
    copied = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert [node.args[0].args[3] for node in copied] == [11]  # the second part
    for expected, got in zip(reference(X, W1, W3), graph_module(X, W1, W3), strict=True):
        assert expected.stride() == got.stride()
        assert relative_difference(expected, got) <= 1e-5


def test_a_graph_without_such_products_stays_as_it_is():
    assert refusals(lambda x, w: x.view(-1, 8) @ w.t() @ w, X, W1) == ""


def test_running_again_changes_nothing():
    graph_module = capture(gated, X, W1, W3)
    run_pass(FuseParallelMatmuls(), graph_module)
    before = program(graph_module)
    assert not run_pass(FuseParallelMatmuls(), graph_module).changed
    assert program(graph_module) == before


def test_wide_products_are_left_alone():
    assert refusals(gated, X, W1, W3, max_columns=5) == ""


def test_products_of_two_phases_stay_apart():
    def step(x, w1, w3):
        with phase("forward"):
            y = x.view(-1, 8) @ w1.t()
        with phase("backward"):
            return y, x.view(-1, 8) @ w3.t()

    assert refusals(step, X, W1, W3) == ""


def test_cannot_fuse_what_is_not_there_yet():
    def step(x, w1, w3):
        y = x.view(-1, 8) @ w1.t()
        return y, x.view(-1, 8) @ (w3 * y.sum()).t()

    assert_expected_inline(
        refusals(step, X, W1, W3),
        """mm_1: its right operand is made after mm, which it could join""",
    )


def test_cannot_fuse_written_memory():
    def step(x, w1, w3):
        y = x.view(-1, 8) @ w1.t()
        w3.add_(1)
        return y, x.view(-1, 8) @ w3.t()

    assert_expected_inline(
        refusals(step, X, W1, W3), """mm_1: the product, or an operand of it, is written to"""
    )


def test_cannot_fuse_across_an_unknown_operator():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("log(Tensor x) -> Tensor")
        library.impl("log", lambda x: x.clone(), "CompositeExplicitAutograd")

        def step(x, w1, w3):
            y = x.view(-1, 8) @ w1.t()
            return y, torch.ops.gt_passes_test.log(x), x.view(-1, 8) @ w3.t()

        assert_expected_inline(
            refusals(step, X, W1, W3),
            """mm_1: an operator of which nothing is known stands between it and mm""",
        )
