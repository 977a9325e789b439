"""When MergeWaits makes several waits one."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, program, run_pass, same_bits

from gt_passes import MergeWaits

X = torch.arange(4.0)


def waited_often(x):
    launched = collectives.all_reduce(x.cos(), "sum", "fsdp")
    first = collectives.wait_tensor(launched)
    second = collectives.wait_tensor(first)
    third = collectives.wait_tensor(launched)
    return second + third, second * 2


def test_can_merge_waits_of_waits_and_waits_of_one_launch():
    """
    launch ─┬─ wait ── wait ── add, mul        launch ── wait ── add, mul
            └─ wait ── add                =>
    """
    graph_module = capture(waited_often, X)
    report = run_pass(MergeWaits(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
cos = aten.cos.default(x_1)
all_reduce = _c10d_functional.all_reduce.default(cos, sum, fsdp)
wait_tensor = _c10d_functional.wait_tensor.default(all_reduce)
add = aten.add.Tensor(wait_tensor, wait_tensor)
mul = aten.mul.Tensor(wait_tensor, 2)
return [add, mul]
""",
    )
    assert report.counts == {"waits_merged": 2}


def test_running_again_changes_nothing():
    graph_module = capture(waited_often, X)
    run_pass(MergeWaits(), graph_module)
    before = program(graph_module)
    assert not run_pass(MergeWaits(), graph_module).changed
    assert program(graph_module) == before


def test_cannot_merge_waits_of_two_launches():
    def two(x):
        launches = [collectives.all_reduce(x, "sum", "fsdp") for _ in range(2)]
        return [collectives.wait_tensor(launched) for launched in launches]

    graph_module = capture(two, X)
    before = program(graph_module)
    assert not run_pass(MergeWaits(), graph_module).changed
    assert program(graph_module) == before


def test_results_keep_every_bit(one_rank_group):
    def step(x):
        launched = collectives.all_reduce(x.cos(), "sum", one_rank_group)
        first = collectives.wait_tensor(launched)
        return collectives.wait_tensor(first) * 3, first

    graph_module = capture(step, X)
    before = graph_module(X)
    assert run_pass(MergeWaits(), graph_module).changed
    assert same_bits(graph_module(X), before)
