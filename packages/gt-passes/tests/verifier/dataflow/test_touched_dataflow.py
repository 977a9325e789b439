"""What a pass touched is shown to be as before by itself, or left to the whole dataflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import capture, node_of
from torch.fx import GraphModule

from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.analysis.scanned_graph import made_again
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.touched_dataflow import Cut, captured_exchanges, exchanges_after
from gt_passes.verifier.memory_order import MemoryOrder
from gt_trace.graph_text import graph_text

aten = torch.ops.aten
X = torch.ones(4, 6)


def is_shown(step: Callable[..., object], edit: Callable[[GraphModule], None]) -> bool:
    """Whether the cut shows that the graph computes the same; held to the whole dataflow."""
    graph_module = capture(step, X)
    scanner = GraphScanner()
    before = MemoryOrder.of(scanner.scan(graph_module))
    edit(graph_module)
    after = MemoryOrder.of(scanner.scan(graph_module, before=before.scan))
    found = exchanges_after(
        before,
        after,
        cut=Cut(),
        exchanges=captured_exchanges(before.scan),
        same_groups={},
        keeps_dataflow=True,
    )
    whole = Dataflow.of(made_again(before.scan).graph_module)
    differences = [*whole.find_differences(Dataflow.of(graph_module, table=whole.table))]
    assert found is None or not differences
    return found is not None


def twice(x: torch.Tensor) -> object:
    return x.exp().sin(), x.exp().cos(), x.t().t().tanh()


def share(edited: GraphModule) -> None:
    node_of(edited, "cos").args = (node_of(edited, "exp"),)
    edited.graph.erase_node(node_of(edited, "exp_1"))


def compute_again(edited: GraphModule) -> None:
    exp = node_of(edited, "exp")
    with edited.graph.inserting_before(node_of(edited, "sin")):
        again = edited.graph.node_copy(exp)
    node_of(edited, "sin").args = (again,)


def fold_views(edited: GraphModule) -> None:
    node_of(edited, "tanh").args = (exp_input := node_of(edited, "exp").args[0],)
    assert exp_input is not None
    for name in ("t_1", "t"):
        edited.graph.erase_node(node_of(edited, name))


@pytest.mark.parametrize("edit", [share, compute_again, fold_views])
def test_what_is_computed_as_before_is_shown(edit: Callable[[GraphModule], None]):
    assert is_shown(twice, edit)


def read_another(edited: GraphModule) -> None:
    node_of(edited, "cos").args = (node_of(edited, "sin"),)


def read_a_view_of_another_shape(edited: GraphModule) -> None:
    exp = node_of(edited, "exp")
    with edited.graph.inserting_after(exp):
        turned = edited.graph.call_function(aten.t.default, (exp,))
    turned.meta["val"] = exp.meta["val"].t()
    node_of(edited, "sin").args = (turned,)


def call_another(edited: GraphModule) -> None:
    node_of(edited, "sin").target = aten.sinh.default


@pytest.mark.parametrize("edit", [read_another, read_a_view_of_another_shape, call_another])
def test_what_differs_is_never_shown(edit: Callable[[GraphModule], None]):
    assert not is_shown(twice, edit)


def test_memory_that_is_written_to_is_left_to_the_whole_dataflow():
    """Before the write and after it the node is the same, and its contents are not."""

    def step(x):
        made = x.exp()
        early = made.sin()
        made.add_(1)
        return early, made.cos()

    def read_early(edited: GraphModule) -> None:
        exp = node_of(edited, "exp")
        with edited.graph.inserting_after(exp):
            again = edited.graph.call_function(aten.cos.default, (exp,))
        again.meta["val"] = exp.meta["val"]
        node_of(edited, "cos").replace_all_uses_with(again)
        edited.graph.erase_node(node_of(edited, "cos"))

    assert not is_shown(step, read_early)


def test_the_graph_of_a_scan_is_made_again_as_it_was():
    graph_module = capture(twice, X)
    text = graph_text(graph_module)
    scan = GraphScanner().scan(graph_module)
    share(graph_module)
    call_another(graph_module)
    assert graph_text(made_again(scan).graph_module) == text
