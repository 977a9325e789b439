"""Which changes surely leave every storage no longer alive, without an estimate of memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from pass_graphs import capture, collectives, node_of
from torch.fx import GraphModule

from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.analysis.liveness import estimate_peak_bytes
from gt_passes.analysis.storages import gives_a_view
from gt_passes.verifier.verification_session import surely_held_no_longer

aten = torch.ops.aten
X = torch.ones(4, 6)


def held_no_longer(edit: Callable[[GraphModule], None]) -> bool:
    def step(x):
        made = x.exp()
        viewed = made.view(24).view(6, 4)
        first, second = x.split(2)
        halves = torch.sub(first, second)
        return viewed.sin(), x.cos(), made.view(24).tanh(), halves

    graph_module = capture(step, X)
    scanner = GraphScanner()
    before = scanner.scan(graph_module)
    edit(graph_module)
    return surely_held_no_longer(before, scanner.scan(graph_module, before=before))


def read_behind_a_view(edited: GraphModule) -> None:
    node_of(edited, "view_1").args = (node_of(edited, "exp"), [6, 4])


def read_through_a_new_view(edited: GraphModule) -> None:
    view = node_of(edited, "view_1")
    with edited.graph.inserting_after(view):
        new = edited.graph.call_function(aten.view.default, (view, [6, 4]))
    new.meta["val"] = view.meta["val"]
    node_of(edited, "sin").args = (new,)


def forget_a_view(edited: GraphModule) -> None:
    node_of(edited, "tanh").args = (node_of(edited, "view"),)
    edited.graph.erase_node(node_of(edited, "view_2"))


@pytest.mark.parametrize("edit", [read_behind_a_view, read_through_a_new_view, forget_a_view])
def test_another_view_of_what_was_read_is_held_no_longer(edit: Callable[[GraphModule], None]):
    assert held_no_longer(edit)


def read_other_memory(edited: GraphModule) -> None:
    node_of(edited, "tanh").args = (node_of(edited, "cos"),)


def keep_by_a_dead_view(edited: GraphModule) -> None:
    with edited.graph.inserting_after(node_of(edited, "tanh")):
        new = edited.graph.call_function(aten.view.default, (node_of(edited, "exp"), [24]))
    new.meta["val"] = node_of(edited, "view").meta["val"]


def copy_instead(edited: GraphModule) -> None:
    node_of(edited, "view_2").target = aten.view_copy.default


def make_earlier(edited: GraphModule) -> None:
    node_of(edited, "exp").prepend(node_of(edited, "cos"))


def record_more(edited: GraphModule) -> None:
    node_of(edited, "cos").meta["val"] = node_of(edited, "cos").meta["val"].double()


def swap_operands(edited: GraphModule) -> None:
    sub = node_of(edited, "sub")
    sub.args = (sub.args[1], sub.args[0])


def take_the_other_result(edited: GraphModule) -> None:
    item = node_of(edited, "getitem")
    item.args = (item.args[0], 1)


@pytest.mark.parametrize(
    "edit",
    [
        read_other_memory,
        keep_by_a_dead_view,
        copy_instead,
        make_earlier,
        record_more,
        swap_operands,
        take_the_other_result,
    ],
)
def test_whatever_may_hold_more_is_left_to_an_estimate(edit: Callable[[GraphModule], None]):
    assert not held_no_longer(edit)


@pytest.mark.parametrize("operator", [aten.reshape.default, aten.contiguous.default])
def test_what_copies_where_it_must_is_no_view(operator):
    assert gives_a_view(aten.view.default)
    assert not gives_a_view(operator)


def test_what_is_given_to_a_collective_is_held_until_it_is_waited_for():
    def step(x):
        return collectives.wait_tensor(collectives.all_reduce(x.exp(), "sum", "fsdp")).sin()

    def wait_no_longer(edited: GraphModule) -> None:
        wait = node_of(edited, "wait_tensor")
        wait.replace_all_uses_with(wait.args[0])
        edited.graph.erase_node(wait)

    def edited(edit: Callable[[GraphModule], None]) -> bool:
        graph_module = capture(step, X)
        scanner = GraphScanner()
        before = scanner.scan(graph_module)
        edit(graph_module)
        return surely_held_no_longer(before, scanner.scan(graph_module, before=before))

    assert edited(lambda graph_module: None)
    assert not edited(wait_no_longer)


def random_step(draw: random.Random) -> GraphModule:
    def step(x):
        made = [x]
        for _ in range(12):
            source = draw.choice(made[-4:])
            operator = draw.choice([aten.view.default, aten.alias.default, aten.sin.default])
            made.append(
                operator(source, [24]) if operator is aten.view.default else operator(source)
            )
        return made[-1], made[-2] + made[-5].view(24)

    return capture(step, torch.ones(24))


def edit_at_random(draw: random.Random, edited: GraphModule) -> None:
    nodes = [node for node in edited.graph.nodes if node.op == "call_function"]
    at = draw.randrange(1, len(nodes))
    reader, source = nodes[at], draw.choice(nodes[:at])
    if draw.random() < 0.3:
        with edited.graph.inserting_before(reader):
            made = edited.graph.call_function(aten.view.default, (source, [24]))
        made.meta["val"] = source.meta["val"]
        source = made
    reader.replace_input_with(draw.choice(reader.all_input_nodes), source)
    for node in reversed(nodes):
        if not node.users and draw.random() < 0.8:
            edited.graph.erase_node(node)


def test_no_estimate_grows_where_storages_are_surely_held_no_longer():
    num_sure = 0
    for seed in range(200):
        draw = random.Random(seed)
        graph_module = random_step(draw)
        scanner = GraphScanner()
        before, estimated = scanner.scan(graph_module), estimate_peak_bytes(graph_module)
        edit_at_random(draw, graph_module)
        if surely_held_no_longer(before, scanner.scan(graph_module, before=before)):
            num_sure += 1
            assert estimate_peak_bytes(graph_module) <= estimated, seed
    assert num_sure >= 20
