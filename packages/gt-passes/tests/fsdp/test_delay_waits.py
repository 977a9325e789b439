"""How far DelayWaits and PrefetchAllGathers move FSDP communication, and what stops them."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from fsdp_graphs import all_reduced, gathered, of_unknown_effect, reduce_scattered
from pass_graphs import capture, collectives, program, run_pass

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes import DelayWaits, PrefetchAllGathers, SeparateReductionGroup
from gt_trace.annotate import annotate

W = torch.ones(2, 4)
V = torch.ones(2, 4)  # the same tensor twice would be one input
X = torch.ones(3, 4)
DZ = torch.ones(3, 4)


def order(graph_module, *interesting):
    """The nodes with these names, in execution order."""
    return [node.name for node in graph_module.graph.nodes if node.name in interesting]


def forward(w, v, x):
    whole = gathered(w, "layers.0.w")
    y = x.cos() @ whole
    other = gathered(v, "layers.1.v")
    return y.cos() @ other


def test_can_wait_right_before_the_first_reader():
    """
    network  [== all-gather ==]                  [== all-gather ==]
    compute                    cos  mm     =>    cos              mm
    """
    graph_module = capture(forward, W, V, X)
    report = run_pass(DelayWaits(), graph_module)
    assert order(graph_module, "all_gather_into_tensor", "cos", "wait_tensor", "mm") == [
        "all_gather_into_tensor",
        "cos",
        "wait_tensor",
        "mm",
    ]
    assert report.counts == {"unshard_waits_moved": 2}


def test_can_prefetch_one_block():
    """
    network  [== g0 ==]      [== g1 ==]          [== g0 ==][== g1 ==]
    compute            cos mm         cos mm  =>  cos      mm     cos mm
    """
    graph_module = capture(forward, W, V, X)
    run_pass(DelayWaits(), graph_module)
    report = run_pass(PrefetchAllGathers(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 2, fsdp)
cos = aten.cos.default(x_1)
all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(v_1, 2, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
mm = aten.mm.default(cos, wait_tensor)
cos_1 = aten.cos.default(mm)
wait_tensor_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
mm_1 = aten.mm.default(cos_1, wait_tensor_1)
return mm_1
""",
    )
    assert report.counts == {"prefetched": 1}


def test_zero_blocks_ahead_is_no_prefetch():
    graph_module = capture(forward, W, V, X)
    assert not run_pass(PrefetchAllGathers(blocks_ahead=0), graph_module).changed


def test_running_either_again_changes_nothing():
    graph_module = capture(forward, W, V, X)
    run_pass(DelayWaits(), graph_module)
    run_pass(PrefetchAllGathers(), graph_module)
    before = program(graph_module)
    assert not run_pass(DelayWaits(), graph_module).changed
    assert not run_pass(PrefetchAllGathers(), graph_module).changed
    assert program(graph_module) == before


def test_graphs_without_fsdp_are_left_alone():
    for graph_pass in (DelayWaits(), PrefetchAllGathers(), SeparateReductionGroup()):
        graph_module = capture(lambda x: x.cos() @ x.t(), X)
        before = program(graph_module)
        assert not run_pass(graph_pass, graph_module).changed
        assert program(graph_module) == before


def test_a_reduction_is_waited_for_behind_the_next_blocks():
    """
    network      [== r1 ==]       [== r0 ==]              [== r1 ==]  [== r0 ==]
    compute  dw1           wait dw0         wait   =>  dw1       dw0 wait       wait
    """

    def backward(x, dy):
        dw1 = reduce_scattered(x.t() @ dy, "layers.1.w")
        dw0 = reduce_scattered(x.t() @ dy.cos(), "layers.0.w")
        return dw1, dw0, dy.sin()

    graph_module = capture(backward, X, DZ)
    report = run_pass(DelayWaits(), graph_module)
    assert order(
        graph_module,
        "reduce_scatter_tensor", "wait_tensor", "div",
        "reduce_scatter_tensor_1", "wait_tensor_1", "div_1", "sin",
    ) == [
        "reduce_scatter_tensor", "reduce_scatter_tensor_1", "wait_tensor", "div",
        "sin", "wait_tensor_1", "div_1",
    ]  # fmt: skip
    assert report.counts == {"reduction_waits_moved": 2}


def test_in_hybrid_sharding_both_reductions_are_delayed():
    def backward(x, dy):
        gradients = []
        for number in (2, 1, 0):
            name = f"layers.{number}.w"
            gradients.append(all_reduced(reduce_scattered(x.t() @ dy + number, name), name))
        return gradients

    graph_module = capture(backward, X, DZ)
    run_pass(DelayWaits(), graph_module)
    launches = [n.name for n in graph_module.graph.nodes if "reduce" in n.name or "wait" in n.name]
    assert launches == [
        "reduce_scatter_tensor", "reduce_scatter_tensor_1",
        "wait_tensor", "all_reduce", "reduce_scatter_tensor_2",
        "wait_tensor_2", "all_reduce_1", "wait_tensor_1",
        "wait_tensor_4", "all_reduce_2", "wait_tensor_3", "wait_tensor_5",
    ]  # fmt: skip


def test_nothing_moves_across_an_operator_of_unknown_effect():
    def step(w, v, x):
        whole = gathered(w, "layers.0.w")
        y = of_unknown_effect(x) @ whole
        return y @ gathered(v, "layers.1.v")

    graph_module = capture(step, W, V, X)
    assert not run_pass(DelayWaits(), graph_module).changed
    report = run_pass(PrefetchAllGathers(), graph_module)
    assert not report.changed
    assert [str(each) for each in report.refusals] == [
        "all_gather_into_tensor_1: a barrier stands between it and wait_tensor"
    ]


def test_a_parameter_that_is_written_to_is_not_prefetched():
    def step(w, v, x):
        y = x @ gathered(w, "layers.0.w")
        v.add_(1)
        return y @ gathered(v, "layers.1.v")

    graph_module = capture(step, W, V, X)
    report = run_pass(PrefetchAllGathers(), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == ["add_ shares memory that is written to"]


def test_reductions_get_a_group_of_their_own_where_parameters_are_gathered():
    def step(w, x, dy):
        y = x @ gathered(w, "layers.0.w")
        return y, reduce_scattered(x.t() @ dy, "layers.0.w")

    graph_module = capture(step, W, X, DZ)
    asked = []

    def second(name):
        asked.append(name)
        return f"{name}, second"

    separate = SeparateReductionGroup(second_group=second)
    assert separate.run(graph_module, None).counts == {"reductions_moved": 1}
    text = program(graph_module)
    assert "all_gather_into_tensor.default(w_1, 2, fsdp)" in text
    assert "reduce_scatter_tensor.default(mm_1, sum, 2, fsdp, second)" in text
    assert asked == ["fsdp"]
    assert not separate.run(graph_module, None).changed


def test_reductions_over_a_group_that_gathers_nothing_keep_it():
    graph_module = capture(lambda dy: reduce_scattered(dy.cos(), "layers.0.w"), torch.ones(4, 4))
    report = run_pass(SeparateReductionGroup(), graph_module)
    assert not report.changed
    assert [each.reason for each in report.refusals] == [
        "group 'fsdp' gathers no parameters that a reduction could delay"
    ]


def test_what_hangs_on_two_waits_moves_with_neither():
    """A bucket over a second axis reads two gatherings, whose other readers come in between."""

    def step(w, v, x):
        first, second = gathered(w, "layers.0.w"), gathered(v, "layers.0.v")
        with annotate(
            FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="inner")
        ):
            launched = collectives.all_gather_into_tensor(torch.cat([first, second]), 2, "inner")
        y = x @ second @ first
        with annotate(
            FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="inner")
        ):
            whole = collectives.wait_tensor(launched)
        return y.cos() @ whole.t()

    graph_module = capture(step, W, V, X)
    report = run_pass(DelayWaits(), graph_module)
    assert order(graph_module, "cat", "mm", "mm_1", "cos", "wait_tensor_2") == [
        "cat",
        "mm",
        "mm_1",
        "cos",
        "wait_tensor_2",
    ]
    assert report.counts == {"unshard_waits_moved": 3}


def test_a_block_whose_second_gatherings_cannot_be_moved_is_prefetched_all_the_same():
    def step(w, v, x):
        whole = gathered_twice(w, "layers.0.w")
        y = x.cos() @ whole
        return y.cos() @ gathered_twice(v, "layers.1.v").t()

    def gathered_twice(shard, name):
        half = gathered(shard, name)
        with annotate(
            FsdpCollectiveAnnotation(kind="unshard", parameter_names=(name,), mesh_axis="inner")
        ):
            launched = collectives.all_gather_into_tensor(half.t(), 2, "inner")
            return collectives.wait_tensor(launched)

    graph_module = capture(step, W, V, torch.ones(3, 8))
    report = run_pass(PrefetchAllGathers(), graph_module)
    assert [each.reason for each in report.refusals] == ["its input is not contiguous"] * 2
    assert report.counts == {"prefetched": 1}
    assert order(
        graph_module, "all_gather_into_tensor_2", "wait_tensor", "cos", "all_gather_into_tensor_1"
    ) == ["all_gather_into_tensor_2", "wait_tensor", "all_gather_into_tensor_1", "cos"]


def test_along_two_axes_the_first_gathering_is_two_blocks_early():
    """
    outer  [= 0 =]        [= 1 =]        [= 2 =]               [= 0 =][= 1 =]   [= 2 =]
    inner         [= 0 =]        [= 1 =]        [= 2 =]     =>        [= 0 =][= 1 =]   [= 2 =]
    compute              0              1              2                    00000000 1111111 2
    """

    def step(a, b, c, x):
        for number, weight in enumerate((a, b, c)):
            name = f"layers.{number}.w"
            x = x.cos() @ gathered(gathered(weight, name), name, group="inner")[:4]
        return x

    weights = [torch.ones(2, 4) + number for number in range(3)]
    graph_module = capture(step, *weights, X)
    run_pass(DelayWaits(), graph_module)
    report = run_pass(PrefetchAllGathers(), graph_module)
    assert report.counts == {"prefetched": 4}
    names = [n.name for n in graph_module.graph.nodes if "gather" in n.name or "wait" in n.name]
    assert names == [
        "all_gather_into_tensor", "wait_tensor", "all_gather_into_tensor_1",
        "all_gather_into_tensor_2", "wait_tensor_2", "all_gather_into_tensor_3",
        "all_gather_into_tensor_4", "wait_tensor_1",  # block 0 begins, block 2 is launched
        "wait_tensor_4", "all_gather_into_tensor_5", "wait_tensor_3", "wait_tensor_5",
    ]  # fmt: skip


def test_what_is_gathered_once_is_one_block_early_beside_what_is_gathered_twice():
    """
    outer  [= 0 =]          [= 1 =]          [= 2 =]
    inner         [= 0, 0' =]      [= 1, 1' =]      [= 2, 2' =]
    """

    def step(a, b, c, d, e, f, x):
        for number, (twice, once) in enumerate(((a, b), (c, d), (e, f))):
            name = f"layers.{number}.twice"
            x = x.cos() @ gathered(gathered(twice, name), name, group="inner")[:4]
            x = x.sin() @ gathered(once, f"layers.{number}.once", group="inner")
        return x

    weights = [torch.ones(2, 4) + number for number in range(6)]
    graph_module = capture(step, *weights, X)
    run_pass(DelayWaits(), graph_module)
    run_pass(PrefetchAllGathers(), graph_module)
    names = [node.name for node in graph_module.graph.nodes]
    begins = [names.index(name) for name in ("cos", "cos_1", "cos_2")]
    # Of block 2: the first of two gatherings before block 0 computes, the others before block 1.
    third = [f"all_gather_into_tensor_{number}" for number in (6, 7, 8)]
    before = [sum(begin < names.index(name) for begin in begins) for name in third]
    assert before == [1, 2, 2]


def test_along_two_axes_reductions_by_one_operator_are_both_delayed():
    def backward(x, dy):
        gradients = []
        for number in (2, 1, 0):
            name = f"layers.{number}.w"
            once = reduce_scattered(x.t() @ dy + number, name)
            gradients.append(reduce_scattered(once, name, group="inner"))
        return gradients

    graph_module = capture(backward, X, DZ)
    run_pass(DelayWaits(), graph_module)
    launches = [n.name for n in graph_module.graph.nodes if "reduce" in n.name or "wait" in n.name]
    assert launches == [
        "reduce_scatter_tensor", "reduce_scatter_tensor_2",
        "wait_tensor", "reduce_scatter_tensor_1", "reduce_scatter_tensor_4",
        "wait_tensor_2", "reduce_scatter_tensor_3", "wait_tensor_1",
        "wait_tensor_4", "reduce_scatter_tensor_5", "wait_tensor_3", "wait_tensor_5",
    ]  # fmt: skip


def test_a_wait_does_not_take_along_a_bucket_of_other_gradients():
    def backward(x, dy):
        gradients = []
        for number in (1, 0):
            name = f"layers.{number}.w"
            small = reduce_scattered((x.t() @ dy)[:, :2] + number, name, group="inner")
            with annotate(
                FsdpCollectiveAnnotation(
                    kind="reduce_grad", parameter_names=(name,), mesh_axis="fsdp"
                )
            ):
                bucket = torch.cat([small.flatten(), (x.t() @ dy.cos() + number).flatten()])
            gradients.append(reduce_scattered(bucket, name))
        return gradients

    graph_module = capture(backward, X, DZ)
    run_pass(DelayWaits(), graph_module)
    assert order(graph_module, "cat", "reduce_scatter_tensor_1", "reduce_scatter_tensor_2") == [
        "cat",
        "reduce_scatter_tensor_1",
        "reduce_scatter_tensor_2",
    ]
