"""Which nodes may share memory, and what is known of it."""

from __future__ import annotations

import torch
from mutation_graphs import capture_attention
from pass_graphs import capture, collectives, node_of
from torch.fx import GraphModule, Node

from gt_passes.analysis.aliasing import (
    AliasClasses,
    has_unknown_effects,
    shared_nodes,
    written_nodes,
)

aten = torch.ops.aten
X = torch.ones(4, 6)


def classes(graph_module: GraphModule) -> AliasClasses:
    return AliasClasses(graph_module.graph)


def share(aliases: AliasClasses, graph_module: GraphModule, *names: str) -> bool:
    return len({aliases.class_of(node_of(graph_module, name)) for name in names}) == 1


def test_views_share_memory_and_results_do_not():
    graph_module = capture(lambda x: x.t()[1:].view(5, 2, 2).cos(), X.t().contiguous().t())
    aliases = classes(graph_module)
    assert share(aliases, graph_module, "x_1", "t", "slice_1", "view")
    assert not share(aliases, graph_module, "x_1", "cos")


def test_items_share_the_memory_of_what_was_split():
    graph_module = capture(lambda x: x.split(2)[1].cos(), X)
    assert share(classes(graph_module), graph_module, "x_1", "getitem_1")


def test_an_unsafe_view_and_a_wait_share_memory_whatever_their_schemas_say():
    def step(x):
        reduced = collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp"))
        return aten._unsafe_view(reduced, [24]).cos()

    graph_module = capture(step, X)
    aliases = classes(graph_module)
    assert share(aliases, graph_module, "all_reduce", "wait_tensor", "_unsafe_view")
    assert not share(aliases, graph_module, "x_1", "all_reduce")


def test_writes_inputs_and_outputs_are_seen_through_views():
    def step(x, y):
        y.view(24).add_(1)
        return x.t(), x.cos().t()

    graph_module = capture(step, X, X.clone())
    aliases = classes(graph_module)
    x, y, cos = (node_of(graph_module, name) for name in ("x_1", "y_1", "cos"))
    assert [aliases.is_written(node) for node in (x, y, cos)] == [False, True, False]
    assert [aliases.holds_input(node) for node in (x, y, cos)] == [True, True, False]
    assert [aliases.holds_output(node) for node in (x, y, cos)] == [True, False, True]
    aliases.merge(cos, y)
    assert aliases.is_written(cos)
    assert aliases.holds_output(y)


def test_operators_that_write_say_to_which_argument():
    graph_module = capture(lambda x, y: aten.copy_(x, y), X, X.clone())
    assert list(written_nodes(node_of(graph_module, "copy_"))) == [node_of(graph_module, "x_1")]
    graph_module = capture(lambda x, y: aten.add.out(x, x, out=y), X, X.clone())
    assert [node.name for node in written_nodes(node_of(graph_module, "add"))] == ["y_1"]


def call(target: object) -> Node:
    graph_module = capture(lambda x: x.cos(), X)
    return graph_module.graph.call_function(target, (node_of(graph_module, "cos"),))


def test_a_function_without_a_schema_may_write_to_all_it_touches():
    node = call(lambda x: x)
    assert has_unknown_effects(node)
    assert [written.name for written in written_nodes(node)] == ["cos"]
    assert AliasClasses(node.graph).class_of(node) is AliasClasses(node.graph).class_of(
        node.args[0]
    ) or AliasClasses(node.graph).is_written(node)


def test_arithmetic_on_sizes_has_no_effects():
    import operator

    assert not has_unknown_effects(call(operator.add))
    assert not has_unknown_effects(call(torch.sym_max))
    assert has_unknown_effects(call(operator.setitem))


def test_what_attention_gives_is_memory_of_its_own():
    """Else a product that is scaled in place before attention would write to the mask."""
    graph = capture_attention().graph_module.graph
    (attention,) = (node for node in graph.nodes if str(node.target) == "flex_attention")
    aliases = AliasClasses(graph)
    read = {aliases.class_of(node) for node in attention.all_input_nodes}
    assert aliases.class_of(attention) not in read
    assert all(aliases.class_of(user) not in read for user in attention.users)
    assert [*shared_nodes(attention)] == []
