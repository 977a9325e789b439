"""Values beside exchanges are the same, whether their sums were short while they were made."""

from __future__ import annotations

import operator

import torch
from exchange_graphs import capture_exchange

from gt_passes._torch_internals import fake_mode_of, quiet_fake_execution
from gt_passes.analysis.tensor_signature import signature
from gt_passes.ep_overlap import graph_chunks
from gt_passes.ep_overlap.graph_chunks import ExchangedValues

aten = torch.ops.aten


def exchange_with_scores():
    """An exchange of four ranks, whose result is cast and multiplied by as many scores."""
    graph_module = capture_exchange(rows=64)
    graph = graph_module.graph
    back = list(graph.nodes)[-2]
    rows = next(iter(graph.nodes))
    with graph.inserting_before(graph.output_node()):
        wide = graph.call_function(aten._to_copy.default, (back,), {"dtype": torch.float64})
        product = graph.call_function(aten.mul.Tensor, (wide, rows))
        graph.call_function(aten.mul.Tensor, (rows, product))
    return graph_module


def evaluated(graph_module, value_of_node):
    mode = fake_mode_of(graph_module.graph)
    found = []
    with quiet_fake_execution(mode, learns_sizes=True):
        for node in graph_module.graph.nodes:
            is_size = node.target is operator.getitem or "scalar" in str(node.target)
            if node.op == "call_function" and not is_size:
                node.meta["val"] = value_of_node(node)
                found.append(node)
    return found


def test_values_are_those_of_whole_sums(monkeypatch):
    expected_of = exchange_with_scores()
    expected = evaluated(expected_of, graph_chunks.evaluate)
    graph_module = exchange_with_scores()
    values = ExchangedValues(fake_mode_of(graph_module.graph).shape_env)
    num_terms = []
    plain = graph_chunks.evaluate

    def counting(node):
        values_read = [each.meta["val"] for each in node.all_input_nodes]
        sizes = [each.shape[0] for each in values_read if isinstance(each, torch.Tensor)]
        num_terms.extend(len(s.node.expr.args) for s in sizes if isinstance(s, torch.SymInt))
        return plain(node)

    monkeypatch.setattr(graph_chunks, "evaluate", counting)
    found = evaluated(graph_module, values.value)
    values.restore(graph_module.graph.nodes)
    assert set(num_terms) == {0}, "an operator read a long sum"
    texts = [[str(signature(node.meta["val"])) for node in nodes] for nodes in (found, expected)]
    assert texts[0] == texts[1]


def test_what_is_found_of_a_sum_makes_it_whole():
    graph_module = capture_exchange(rows=64)
    graph = graph_module.graph
    wait = next(node for node in graph.nodes if "wait" in str(node.target))
    with graph.inserting_after(wait):
        graph.call_function(aten.add.Tensor, (wait, next(iter(graph.nodes))))
    whole = str(signature(wait.meta["val"]))
    values = ExchangedValues(fake_mode_of(graph).shape_env)
    nodes = evaluated(graph_module, values.value)
    values.restore(graph.nodes)
    added = next(node for node in nodes if node.target is aten.add.Tensor)
    assert added.meta["val"].shape == (64, 8)
    assert str(signature(wait.meta["val"])) == whole
    assert not fake_mode_of(graph).shape_env.replacements


def test_without_symbolic_sizes_nodes_are_evaluated_as_they_are():
    graph_module = capture_exchange()
    values = ExchangedValues(None)
    wait = list(graph_module.graph.nodes)[-2]
    with quiet_fake_execution(fake_mode_of(graph_module.graph)):
        assert signature(values.value(wait)) == signature(wait.meta["val"])
