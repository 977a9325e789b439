"""The dataflow of tensors whose sizes only data decide: views of them, copies, and what they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable

aten = torch.ops.aten
Call = Callable[..., Node]


def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The rows that are wanted: as many as there are values above zero."""
    return x[y.nonzero().squeeze(1)]


def step_with(add: Callable[[Call, Node], Node]) -> GraphModule:
    """The step, with more calls on its result."""
    graph_module = make_fx(step, tracing_mode="symbolic")(torch.ones(6, 4), torch.ones(6))
    (output,) = graph_module.graph.find_nodes(op="output")

    def call(target: Any, *args: Any) -> Node:
        with graph_module.graph.inserting_before(output):
            node = graph_module.graph.call_function(target, args)
        tokens = output.args[0].meta["val"]
        with tokens.fake_mode:
            node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
        return node

    output.args = (add(call, output.args[0]),)
    return graph_module


def same(before: Callable[[Call, Node], Node], after: Callable[[Call, Node], Node]) -> bool:
    table = ValueTable()
    first, second = (Dataflow.of(step_with(add), table=table) for add in (before, after))
    return not list(first.find_differences(second))


def reshaped(call: Call, source: Node, tokens: Node) -> Node:
    return call(aten.reshape.default, source, [call(aten.sym_size.int, tokens, d) for d in (0, 1)])


def test_can_fold_views_that_end_where_they_began():
    def turned_twice(call: Call, tokens: Node) -> Node:
        return call(aten.t.default, call(aten.t.default, tokens))

    def flattened(call: Call, tokens: Node) -> Node:
        return reshaped(call, call(aten.view.default, tokens, [-1]), tokens)

    for after in (turned_twice, flattened):
        assert same(lambda call, tokens: tokens, after)


def test_cannot_take_a_reshape_that_copies_for_a_view():
    def turned(call: Call, tokens: Node) -> Node:
        return reshaped(call, call(aten.t.default, tokens), tokens)

    assert not same(lambda call, tokens: tokens, turned)
    assert not same(lambda call, tokens: reshaped(call, tokens, tokens), turned)
    assert same(turned, turned)


@pytest.mark.parametrize("read", [1, 2])
def test_cannot_take_another_count_of_rows(read: int):
    """How many rows ``nonzero`` finds is what it found, whatever its symbol is called."""

    def counted(call: Call, tokens: Node, source: Node) -> Node:
        found = call(aten.nonzero.default, source)
        return call(aten.ones.default, [call(aten.sym_size.int, found, 0)])

    def of_inputs(call: Call, tokens: Node) -> list[Node]:
        return tokens.graph.find_nodes(op="placeholder")

    def before(call: Call, tokens: Node) -> Node:
        return counted(call, tokens, of_inputs(call, tokens)[1])

    def after(call: Call, tokens: Node) -> Node:
        return counted(call, tokens, of_inputs(call, tokens)[read - 1])

    assert same(before, after) == (read == 2)
