"""Forms of calls: what two calls have in common that differ in the nodes they read alone."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gt_passes.analysis.call_form import CallForm, call_form

aten = torch.ops.aten


@pytest.fixture
def nodes() -> tuple[Node, Node]:
    graph = Graph()
    return graph.placeholder("x"), graph.placeholder("y")


def form(*args: object, **kwargs: object) -> CallForm:
    return call_form(aten.add.Tensor, args, kwargs)[0]


def test_calls_of_other_nodes_have_one_form(nodes: tuple[Node, Node]) -> None:
    x, y = nodes
    one, operands = call_form(aten.cat.default, ([x, y, x], 1), {})
    other, _ = call_form(aten.cat.default, ([y, y, y], 1), {})
    assert one is other
    assert operands == (x, y, x)
    assert one.num_operands == 3


def test_constants_targets_and_places_of_nodes_tell_forms_apart(nodes: tuple[Node, Node]) -> None:
    x, y = nodes
    different = [
        form(x, y),
        form(x, 1),
        form(1, x),
        form(x, True),
        form(x, 1.0),
        form(x, 0.0),
        form(x, -0.0),
        form(x, [1, 2]),
        form(x, [1, y]),
        form(x, [1]),
        form(x, y, alpha=1),
        form(x, y, alpha=2),
        form(x, alpha=y),
        call_form(aten.sub.Tensor, (x, y), {})[0],
    ]
    assert len(set(different)) == len(different)


def test_the_order_of_keyword_arguments_does_not_matter(nodes: tuple[Node, Node]) -> None:
    x, y = nodes
    one = call_form(aten.add.Tensor, (), {"self": x, "other": y})
    other = call_form(aten.add.Tensor, (), {"other": y, "self": x})
    assert one[0] is other[0]
    assert one[1] == other[1] == (y, x)


def test_filled_writes_a_call_out(nodes: tuple[Node, Node]) -> None:
    x, y = nodes
    made = form([x, 3], (4, 5), y, alpha=2.0)
    assert made.filled((7, 8)) == (
        ("list", 7, (int, 3)),
        ("list", (int, 4), (int, 5)),
        8,
        ("alpha", (float, (2.0).hex())),
    )


def test_a_call_with_a_symbolic_size_is_not_known_by_its_form(nodes: tuple[Node, Node]) -> None:
    size = ShapeEnv().create_unbacked_symint()
    assert not form(nodes[0], size).is_exact
    assert not form(nodes[0], [2, size]).is_exact
    assert form(nodes[0], 2).is_exact
