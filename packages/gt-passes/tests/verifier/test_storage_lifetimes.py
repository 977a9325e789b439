"""Which changes surely leave every storage no longer alive, without an estimate of memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import capture, node_of
from torch.fx import GraphModule

from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.verifier.storage_lifetimes import surely_held_no_longer

aten = torch.ops.aten
X = torch.ones(4, 6)


def held_no_longer(edit: Callable[[GraphModule], None]) -> bool:
    def step(x):
        made = x.exp()
        viewed = made.view(24).view(6, 4)
        return viewed.sin(), x.cos(), made.view(24).tanh()

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


@pytest.mark.parametrize(
    "edit", [read_other_memory, keep_by_a_dead_view, copy_instead, make_earlier, record_more]
)
def test_whatever_may_hold_more_is_left_to_an_estimate(edit: Callable[[GraphModule], None]):
    assert not held_no_longer(edit)
