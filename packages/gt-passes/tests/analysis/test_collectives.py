"""Launches, waits and bytes are read off the operators of a graph."""

from __future__ import annotations

import torch
from pass_graphs import capture, collectives, node_of

from gt_passes.analysis.collectives import (
    collective_bytes,
    is_collective,
    is_pure_collective,
    is_wait,
    raw_results,
)

X = torch.ones(4, 6)


def test_tells_launches_from_waits_and_from_the_rest():
    graph_module = capture(
        lambda x: collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp")).cos(), X
    )
    kinds = {node.name: (is_collective(node), is_wait(node)) for node in graph_module.graph.nodes}
    assert kinds == {
        "x_1": (False, False),
        "all_reduce": (True, False),
        "wait_tensor": (False, True),
        "cos": (False, False),
        "output": (False, False),
    }


def test_a_collective_in_place_is_not_pure():
    def step(x):
        fresh = collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp"))
        return fresh, collectives.wait_tensor(collectives.all_reduce_(x, "sum", "dp"))

    graph_module = capture(step, X)
    assert is_pure_collective(node_of(graph_module, "all_reduce"))
    assert is_collective(node_of(graph_module, "all_reduce_"))
    assert not is_pure_collective(node_of(graph_module, "all_reduce_"))
    assert not is_pure_collective(node_of(graph_module, "wait_tensor"))


def test_the_results_of_a_coalesced_collective_are_its_items():
    def step(x):
        first, second = collectives.all_reduce_coalesced([x, x.cos()], "sum", "dp")
        return collectives.wait_tensor(first), collectives.wait_tensor(second)

    graph_module = capture(step, X)
    launch = node_of(graph_module, "all_reduce_coalesced")
    assert [result.name for result in raw_results(launch)] == ["getitem", "getitem_1"]
    assert collective_bytes(graph_module) == 2 * 4 * 6 * 4


def test_counts_the_larger_of_input_and_output():
    def step(x):
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(x, 8, "fsdp"))
        scattered = collectives.reduce_scatter_tensor(gathered.bfloat16(), "sum", 8, "fsdp")
        return collectives.wait_tensor(scattered)

    assert collective_bytes(capture(step, X)) == 8 * 4 * 6 * 4 + 8 * 4 * 6 * 2
    assert collective_bytes(capture(lambda x: x.cos(), X)) == 0


def test_the_room_for_a_result_is_not_given_to_a_collective():
    def step(x):
        gathered, scattered = x.new_empty(8 * 4, 6), x.new_empty(4, 6)
        collectives.wait_tensor(collectives.all_gather_into_tensor_out(x, 8, "fsdp", out=gathered))
        return collectives.wait_tensor(
            collectives.reduce_scatter_tensor_out(gathered, "sum", 8, "fsdp", out=scattered)
        )

    assert collective_bytes(capture(step, X)) == 2 * 8 * 4 * 6 * 4


def test_data_dependent_sizes_count_as_nothing():
    def step(x, splits):
        sizes = splits.tolist()
        for size in sizes:
            torch._check(size >= 0)
        return collectives.wait_tensor(collectives.all_to_all_single(x, sizes, sizes, "ep")).sum()

    assert collective_bytes(capture(step, X, torch.tensor([2, 2]))) == 4 * 6 * 4  # what goes in
