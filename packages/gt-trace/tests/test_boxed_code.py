"""Graphs as functions that empty their list of inputs and call operators directly."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from gt_trace import boxed, trace_step
from gt_trace.capture.trace import trace_without_code


def _graph(equation: str = "ij,jk->ik") -> GraphModule:
    graph = Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    product = graph.call_function(torch.ops.aten.einsum.default, (equation, [left, right]))
    total = graph.call_function(torch.ops.aten.sum.default, (product,))
    largest = graph.call_function(torch.ops.aten.max.dim, (product, 1))
    graph.output((product, total, graph.call_function(torch.max, (left,)), largest))
    return GraphModule(torch.nn.Module(), graph)


def test_results_are_those_of_the_module_and_the_list_is_empty() -> None:
    module, inputs = _graph(), [torch.randn(2, 3), torch.randn(3, 4)]
    expected = module(*inputs)
    results = boxed(module)(inputs)
    assert inputs == []
    torch.testing.assert_close(list(results), list(expected), rtol=0, atol=0)


def test_operators_are_called_without_lookups_and_other_functions_as_before() -> None:
    code = inspect.getsource(boxed(_graph()).__func__)  # type: ignore[attr-defined]
    assert "call_0_einsum_default(" in code
    assert "call_1_sum_default(" in code
    assert "torch.ops" not in code
    assert "torch.max(" in code


def test_text_in_an_argument_stays() -> None:
    module = _graph("x = torch.ops.aten.sum.default(")
    code = inspect.getsource(boxed(module).__func__)  # type: ignore[attr-defined]
    assert "call_0_einsum_default('x = torch.ops.aten.sum.default('" in code


def test_later_edits_change_nothing_and_the_graph_keeps_its_own_code() -> None:
    module = _graph()
    before, run = module.code, boxed(module)
    assert module.graph.python_code("self").src == before
    output = module.graph.output_node()
    output.args = ((output.args[0][0],),)  # type: ignore[index]
    module.recompile()
    assert len(run([torch.ones(2, 3), torch.ones(3, 4)])) == 4


def test_operators_whose_names_are_alike_put_together_are_two() -> None:
    library, other = torch.library.Library("alike", "DEF"), torch.library.Library("alike_of", "DEF")
    for each, name, amount in ((library, "of_add", 1), (other, "add", 100)):
        each.define(f"{name}(Tensor x) -> Tensor")
        each.impl(name, lambda x, amount=amount: x + amount, "CompositeExplicitAutograd")
    graph = Graph()
    x = graph.placeholder("x")
    calls = [torch.ops.alike.of_add.default, torch.ops.alike_of.add.default]
    graph.output(tuple(graph.call_function(each, (x,)) for each in calls))
    results = boxed(GraphModule(torch.nn.Module(), graph))([torch.zeros(1)])
    assert [int(each) for each in results] == [1, 100]


@pytest.mark.parametrize("trace", [trace_step, trace_without_code])
def test_an_edit_runs_once_it_is_compiled(trace: Any) -> None:
    traced = trace(lambda x: x + 1, module=None)(torch.zeros(1))
    bound = traced.bind()
    (add,) = traced.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.add.Tensor
    )
    for amount in (5, 7):
        before = bound(torch.zeros(1))
        add.args = (add.args[0], amount)
        assert torch.equal(bound(torch.zeros(1)), before)
        traced.graph_module.recompile()
        assert bound(torch.zeros(1)) == amount
