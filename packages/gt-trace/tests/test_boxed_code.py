"""Graphs as functions that empty their list of inputs and call operators directly."""

from __future__ import annotations

import inspect

import torch
from torch.fx import Graph, GraphModule

from gt_trace import boxed


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
    assert "call_aten_einsum_default(" in code
    assert "call_aten_sum_default(" in code
    assert "torch.ops" not in code
    assert "torch.max(" in code


def test_text_in_an_argument_stays() -> None:
    module = _graph("x = torch.ops.aten.sum.default(")
    code = inspect.getsource(boxed(module).__func__)  # type: ignore[attr-defined]
    assert "call_aten_einsum_default('x = torch.ops.aten.sum.default('" in code


def test_later_edits_change_nothing_and_the_graph_keeps_its_own_code() -> None:
    module = _graph()
    before, run = module.code, boxed(module)
    assert module.graph.python_code("self").src == before
    output = module.graph.output_node()
    output.args = ((output.args[0][0],),)  # type: ignore[index]
    module.recompile()
    assert len(run([torch.ones(2, 3), torch.ones(3, 4)])) == 4
