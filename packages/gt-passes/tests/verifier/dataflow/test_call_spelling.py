"""The same call in another spelling is the same value; another call is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import capture
from program_pairs import aten

from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable

X = torch.ones(4, 6)
Y = torch.ones(4, 6)


def is_same_call(target, first, second, *tensors: torch.Tensor) -> bool:
    """Whether a graph is the same after its one call was spelled otherwise.

    Args:
        target: the operator.
        first: maps nodes to positional and keyword arguments.
        second: the other spelling.
        tensors: inputs of the graph.
    """

    def run(*inputs):
        args, kwargs = first(*inputs)
        result = target(*args, **kwargs)
        return result[0] if isinstance(result, (tuple, list)) else result

    graph_module = capture(run, *tensors)
    table = ValueTable()
    before = Dataflow.of(graph_module, table=table)
    (call,) = graph_module.graph.find_nodes(op="call_function", target=target)
    call.args, call.kwargs = second(*graph_module.graph.find_nodes(op="placeholder"))
    return not list(before.find_differences(Dataflow.of(graph_module, table=table)))


Spelling = Callable[..., tuple[tuple[object, ...], dict[str, object]]]

SAME: dict[str, tuple[object, Spelling, Spelling]] = {
    "a default": (
        aten.add.Tensor,
        lambda x, y: ((x, y), {}),
        lambda x, y: ((x, y), {"alpha": 1}),
    ),
    "a name": (
        aten.add.Tensor,
        lambda x, y: ((x, y), {}),
        lambda x, y: ((), {"other": y, "self": x}),
    ),
    "names of two operands": (
        aten.sub.Tensor,
        lambda x, y: ((x, y), {}),
        lambda x, y: ((), {"other": y, "self": x}),
    ),
    "a list of dims from the end": (
        aten.sum.dim_IntList,
        lambda x, y: ((x, [1]), {}),
        lambda x, y: ((x, [-1]), {}),
    ),
    "a dim from the end": (
        aten._softmax.default,
        lambda x, y: ((x, 1, False), {}),
        lambda x, y: ((x, -1, False), {}),
    ),
    "a default among positional arguments": (
        aten.mean.dim,
        lambda x, y: ((x, [0]), {}),
        lambda x, y: ((x, [-2], False), {"dtype": None}),
    ),
    "an index along a dim from the end": (
        aten.cumsum.default,
        lambda x, y: ((x, 1), {}),
        lambda x, y: ((), {"dim": -1, "self": x}),
    ),
}

OTHER: dict[str, tuple[object, Spelling, Spelling]] = {
    "another factor": (
        aten.add.Tensor,
        lambda x, y: ((x, y), {}),
        lambda x, y: ((x, y), {"alpha": 2}),
    ),
    "operands exchanged by name": (
        aten.sub.Tensor,
        lambda x, y: ((x, y), {}),
        lambda x, y: ((), {"other": x, "self": y}),
    ),
    "another dim": (
        aten._softmax.default,
        lambda x, y: ((x, 1, False), {}),
        lambda x, y: ((x, -2, False), {}),
    ),
    "a dim that is one of the result": (
        aten.select_backward.default,
        lambda x, y: ((x, [4, 6, 6], -1, 0), {}),
        lambda x, y: ((x, [4, 6, 6], 1, 0), {}),
    ),
    "a fraction for a whole number": (
        aten.add.Tensor,
        lambda x, y: ((x, y), {}),
        lambda x, y: ((x, y), {"alpha": 1.0}),
    ),
    "dimensions kept": (
        aten.sum.dim_IntList,
        lambda x, y: ((x, [1]), {}),
        lambda x, y: ((x, [-1], True), {}),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_call_spelled_otherwise_is_accepted(name):
    assert is_same_call(*SAME[name], X, Y)


@pytest.mark.parametrize("name", OTHER)
def test_another_call_is_not(name):
    assert not is_same_call(*OTHER[name], X, Y)


def test_random_draws_and_writes_are_the_same_in_every_spelling():
    def run(x):
        buffer = x.clone()
        buffer.index_add_(1, torch.tensor([0, 1]), x[:, :2])
        return buffer, torch.ops.aten.bernoulli.p(x, 0.5)

    graph_module = capture(run, X)
    table = ValueTable()
    before = Dataflow.of(graph_module, table=table)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.index_add_.default):
        node.update_arg(1, -1)
        node.kwargs = {"alpha": 1}
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        node.kwargs = {"generator": None}
    assert not list(before.find_differences(Dataflow.of(graph_module, table=table)))
