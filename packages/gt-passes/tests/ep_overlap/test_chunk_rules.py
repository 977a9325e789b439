"""What rules say of operators holds on real values, chunk by chunk, or they refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from gt_passes.ep_overlap.chunk_rules import find_rule
from gt_passes.ep_overlap.chunk_states import Layout, Local, Partial, Sharded, State, Whole
from gt_passes.ep_overlap.rule_calls import NotProvenError, RuleCall, RuleOutcome, Scaled

aten = torch.ops.aten

EXTENT = 4


class Operation:
    """One operator on real tensors, as a node of a graph."""

    def __init__(self, target: Any, *args: Any) -> None:
        graph = Graph()
        self.operands: list[Node] = []
        placed: dict[int, Node] = {}

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in placed:
                placed[id(leaf)] = node = graph.placeholder(f"operand{len(placed)}")
                node.meta["val"] = leaf
                self.operands.append(node)
            return placed[id(leaf)]

        self.node = graph.call_function(target, map_aggregate(args, place))
        self.node.meta["val"] = target(*args)

    def judge(self, states: list[State]) -> RuleOutcome:
        """What its rule answers."""
        outcomes = {
            node: RuleOutcome(state=state)
            for node, state in zip(self.operands, states, strict=True)
        }
        found = find_rule(self.node)
        assert found is not None
        answer = found(RuleCall(node=self.node, outcomes=outcomes, extent=EXTENT))
        return answer if isinstance(answer, RuleOutcome) else RuleOutcome(state=answer)

    def wrong_results(self, states: list[State], sizes: tuple[int, ...]) -> list[int]:
        """Which results, run chunk by chunk as the rule says and joined, are not the whole ones.

        Raises:
            NotProvenError: the rule refuses.
        """
        outcome = self.judge(states)
        given = dict(zip(self.operands, states, strict=True))
        parts = {
            node: parts_of(node.meta["val"], state, sizes)
            if node not in outcome.cuts
            else parts_of(node.meta["val"], Sharded(outcome.cuts[node]), sizes)
            for node, state in given.items()
        }
        found = outcome.state if isinstance(outcome.state, tuple) else (outcome.state,)
        whole = as_list(self.node.meta["val"])
        assert len(found) == len(whole)
        results: list[list[Any]] = []
        for chunk, size in enumerate(sizes):

            def load(leaf: Any, chunk: int = chunk, size: int = size) -> Any:
                if isinstance(leaf, Scaled):
                    return leaf.factor * size
                return parts[leaf][chunk] if isinstance(leaf, Node) else leaf

            args = self.node.args if outcome.args is None else outcome.args
            try:
                results.append(as_list(self.node.target(*map_aggregate(args, load))))
            except (RuntimeError, IndexError) as error:
                raise NotProvenError("it does not run on a chunk") from error
        return [
            index
            for index, (state, expected) in enumerate(zip(found, whole, strict=True))
            if not is_join(state, [result[index] for result in results], expected)
        ]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def parts_of(value: torch.Tensor, state: State, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """What each chunk has of a value in a state."""
    if isinstance(state, Sharded):
        layout = state.layout
        unfolded = value.unflatten(layout.dim, (layout.outer, -1))
        rows = [size * layout.inner for size in sizes]
        split = unfolded.split(rows, dim=layout.dim + 1)
        return [part.flatten(layout.dim, layout.dim + 1).contiguous() for part in split]
    if isinstance(state, Partial):
        terms = [torch.randn(value.shape, dtype=value.dtype) for _ in sizes[1:]]
        return [*terms, value - sum(terms)]
    return [value] * len(sizes)


def is_join(state: State, parts: list[Any], expected: Any) -> bool:
    if isinstance(state, Local) or not isinstance(expected, torch.Tensor):
        return True  # it says nothing
    if isinstance(state, Whole):
        joined = parts[0]
        assert all(torch.equal(part, joined) for part in parts)
    elif isinstance(state, Partial):
        joined = functools.reduce(torch.add, parts)
    else:
        layout = state.layout
        unfolded = [part.unflatten(layout.dim, (layout.outer, -1)) for part in parts]
        joined = torch.cat(unfolded, dim=layout.dim + 1).flatten(layout.dim, layout.dim + 1)
    return joined.shape == expected.shape and torch.allclose(
        joined, expected, rtol=1e-8, atol=1e-8, equal_nan=True
    )


GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def indices(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=GENERATOR)


def sharded(dim: int, *, outer: int = 1, inner: int = 1) -> Sharded:
    return Sharded(Layout(dim=dim, outer=outer, inner=inner))


WHOLE, PARTIAL, LOCAL = Whole(), Partial(), Local()
NORM = (aten.native_layer_norm.default, random(4, 5, 3), [3], random(3), random(3), 1e-5)


@pytest.mark.parametrize(
    ("operation", "states", "expected"),
    [
        # pointwise
        (Operation(aten.add.Tensor, random(4, 3), random(3)), [sharded(0), WHOLE], sharded(0)),
        (
            Operation(aten.mul.Tensor, random(2, 4, 3), random(4, 1)),
            [WHOLE, sharded(0)],
            sharded(1),
        ),
        (
            Operation(aten.mul.Tensor, random(8, 3), random(8, 1)),
            [sharded(0, inner=2), WHOLE],
            sharded(0, inner=2),
        ),
        (Operation(aten.mul.Tensor, random(3), random(3)), [PARTIAL, WHOLE], PARTIAL),
        (Operation(aten.add.Tensor, random(3), random(3)), [PARTIAL, PARTIAL], PARTIAL),
        (Operation(aten.add.Tensor, random(3), random(3)), [LOCAL, WHOLE], LOCAL),
        # views
        (Operation(aten.view.default, random(2, 4, 3), [8, 3]), [sharded(1)], sharded(0, outer=2)),
        (Operation(aten.view.default, random(4, 6), [8, 3]), [sharded(0)], sharded(0, inner=2)),
        (Operation(aten.expand.default, random(4, 1), [3, 4, 5]), [sharded(0)], sharded(1)),
        (Operation(aten.transpose.int, random(4, 3), 0, 1), [sharded(0)], sharded(1)),
        (Operation(aten.select.int, random(3, 4), 0, 1), [sharded(1)], sharded(0)),
        (Operation(aten.slice.Tensor, random(4, 8), 1, 2, 5), [sharded(0)], sharded(0)),
        (Operation(aten.split.Tensor, random(4, 6), 4, 1), [sharded(0)], (sharded(0),) * 2),
        (Operation(aten.unbind.int, random(2, 4)), [sharded(1)], (sharded(0),) * 2),
        (Operation(aten.t.default, random(4, 3)), [PARTIAL], PARTIAL),
        # along dimensions
        (Operation(aten.sum.dim_IntList, random(4, 3), [0]), [sharded(0)], PARTIAL),
        (Operation(aten.sum.dim_IntList, random(2, 4, 3), [0]), [sharded(1)], sharded(0)),
        (Operation(aten.sum.default, random(4, 3)), [sharded(0)], PARTIAL),
        (Operation(aten.mean.dim, random(4, 3), [1], True), [sharded(0)], sharded(0)),
        (Operation(aten.max.dim, random(3, 4), 0), [sharded(1)], (sharded(0),) * 2),
        (Operation(aten._softmax.default, random(4, 3), -1, False), [sharded(0)], sharded(0)),
        (Operation(aten.cumsum.default, random(4, 3), 1), [sharded(0)], sharded(0)),
        (Operation(aten.topk.default, random(4, 3), 2), [sharded(0)], (sharded(0),) * 2),
        (
            Operation(aten.cat.default, [random(4, 3), random(4, 2)], 1),
            [sharded(0), WHOLE],
            sharded(0),
        ),
        (Operation(aten.cat.default, [random(3), random(3)]), [PARTIAL, PARTIAL], PARTIAL),
        (
            Operation(aten.stack.default, [random(4, 3), random(4, 3)]),
            [sharded(0), WHOLE],
            sharded(1),
        ),
        (
            Operation(aten.gather.default, random(4, 3), 1, indices(4, 2, below=3)),
            [sharded(0)] * 2,
            sharded(0),
        ),
        (
            Operation(aten.slice_backward.default, random(4, 2), [4, 6], 1, 0, 2, 1),
            [sharded(0)],
            sharded(0),
        ),
        (
            Operation(aten.select_backward.default, random(4, 2), [3, 4, 2], 0, 1),
            [sharded(0)],
            sharded(1),
        ),
        (
            Operation(aten.constant_pad_nd.default, random(4, 2), [1, 2], 7.0),
            [sharded(0)],
            sharded(0),
        ),
        (Operation(aten.constant_pad_nd.default, random(4, 2), [1, 2], 0), [PARTIAL], PARTIAL),
        (Operation(*NORM), [sharded(0), WHOLE, WHOLE], (sharded(0),) * 3),
        # products
        (Operation(aten.mm.default, random(4, 3), random(3, 2)), [sharded(0), WHOLE], sharded(0)),
        (Operation(aten.mm.default, random(3, 4), random(4, 2)), [sharded(1), WHOLE], PARTIAL),
        (Operation(aten.mm.default, random(2, 3), random(3, 2)), [PARTIAL, WHOLE], PARTIAL),
        (
            Operation(aten.bmm.default, random(4, 3, 2), random(4, 2, 3)),
            [sharded(0), WHOLE],
            sharded(0),
        ),
        (
            Operation(aten.addmm.default, random(2), random(4, 3), random(3, 2)),
            [WHOLE, sharded(0), WHOLE],
            sharded(0),
        ),
        # lookups
        (
            Operation(aten.embedding.default, random(5, 2), indices(4, 3, below=5)),
            [WHOLE, sharded(0)],
            sharded(0),
        ),
        (
            Operation(aten.index.Tensor, random(2, 5), [None, indices(4, below=5)]),
            [WHOLE, sharded(0)],
            sharded(1),
        ),
    ],
)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (1, 1, 2)], ids=str)
def test_a_rule_says_what_chunks_join_to(
    operation: Operation,
    states: list[State],
    expected: State | tuple[State, ...],
    sizes: tuple[int, ...],
):
    assert operation.judge(states).state == expected
    assert operation.wrong_results(states, sizes) == []


@pytest.mark.parametrize(
    ("operation", "states", "reason"),
    [
        (Operation(aten.add.Tensor, random(3), random(3)), [PARTIAL, WHOLE], "linear"),
        (Operation(aten.add.Tensor, random(3), 1.0), [PARTIAL], "linear"),
        (Operation(aten.tanh.default, random(3)), [PARTIAL], "linear"),
        (Operation(aten.div.Tensor, random(3), random(3)), [WHOLE, PARTIAL], "linear"),
        (
            Operation(aten.mul.Tensor, random(4, 4), random(4, 4)),
            [sharded(0), sharded(1)],
            "different dim",
        ),
        (
            Operation(aten.view.default, random(4, 6), [6, 4]),
            [sharded(0)],
            "spreads the chunked dim",
        ),
        (Operation(aten.select.int, random(3, 4), 1, 1), [sharded(1)], "works along dim 1"),
        (
            Operation(aten.slice.Tensor, random(8, 3), 0, 2, 6),
            [sharded(0, outer=2)],
            "works along dim 0",
        ),
        (Operation(aten.mean.dim, random(4, 3), [0]), [sharded(0)], "works along dim 0"),
        (Operation(aten.amax.default, random(3), [0]), [PARTIAL], "linear"),
        (
            Operation(aten._softmax.default, random(4, 3), 0, False),
            [sharded(0)],
            "works along dim 0",
        ),
        (Operation(aten.sort.default, random(4, 3), 0), [sharded(0)], "works along dim 0"),
        (
            Operation(aten.cat.default, [random(4, 3), random(4, 3)]),
            [sharded(0), WHOLE],
            "works along dim 0",
        ),
        (Operation(aten.cat.default, [random(3), random(3)]), [PARTIAL, WHOLE], "linear"),
        (
            Operation(aten.gather.default, random(4, 3), 0, indices(4, 3, below=4)),
            [sharded(0)] * 2,
            "works along",
        ),
        (
            Operation(aten.constant_pad_nd.default, random(4, 2), [0, 0, 1, 1]),
            [sharded(0)],
            "works along dim 0",
        ),
        (Operation(aten.constant_pad_nd.default, random(4, 2), [1, 2], 7.0), [PARTIAL], "linear"),
        (
            Operation(aten.native_layer_norm.default, random(5, 4), [4], None, None, 1e-5),
            [sharded(1)],
            "works along dim 1",
        ),
        (
            Operation(aten.mm.default, random(4, 3), random(3, 4)),
            [sharded(0), sharded(1)],
            "different dim",
        ),
        (Operation(aten.mm.default, random(2, 3), random(3, 2)), [PARTIAL, PARTIAL], "linear"),
        (
            Operation(aten.addmm.default, random(2), random(3, 4), random(4, 2)),
            [WHOLE, sharded(1), WHOLE],
            "works along",
        ),
        (
            Operation(aten.embedding.default, random(4, 2), indices(3, below=4)),
            [sharded(0), WHOLE],
            "works along",
        ),
        (
            Operation(aten.index.Tensor, random(4, 5), [indices(4, below=4)]),
            [sharded(0), WHOLE],
            "works along",
        ),
    ],
)
def test_a_rule_refuses_what_is_not_proven(operation: Operation, states: list[State], reason: str):
    with pytest.raises(NotProvenError, match=reason):
        operation.judge(states)


# Sizes that are alike, so that nothing but the rule tells dimensions apart.
SQUARE, CUBE = random(4, 4), random(4, 8, 4)
OPERATIONS = [
    Operation(aten.add.Tensor, CUBE, SQUARE.select(0, 0)),
    Operation(aten.mul.Tensor, SQUARE, SQUARE),
    Operation(aten.mul.Tensor, SQUARE, random(4, 1)),
    Operation(aten.div.Tensor, SQUARE, random(4, 4)),
    Operation(aten.div.Tensor, SQUARE, SQUARE),
    Operation(aten.exp.default, SQUARE),
    Operation(aten.view.default, CUBE, [32, 4]),
    Operation(aten.view.default, CUBE, [4, 2, 4, 4]),
    Operation(aten.view.default, CUBE, [8, 16]),
    Operation(aten.permute.default, CUBE, [2, 0, 1]),
    Operation(aten.expand.default, SQUARE, [4, 4, 4]),
    Operation(aten.select.int, CUBE, 1, 3),
    Operation(aten.slice.Tensor, CUBE, 1, 0, 4),
    Operation(aten.slice.Tensor, random(12, 4), 0, 4, 8),
    Operation(aten.slice.Tensor, CUBE, 1, 0, 8, 2),
    Operation(aten.split.Tensor, CUBE, 4, 1),
    Operation(aten.unbind.int, CUBE, 2),
    Operation(aten.sum.dim_IntList, CUBE, [0, 2]),
    Operation(aten.sum.default, CUBE),
    Operation(aten.amax.default, CUBE, [1], True),
    Operation(aten._softmax.default, CUBE, 1, False),
    Operation(aten.cumsum.default, CUBE, 2),
    Operation(aten.sort.default, CUBE, 0),
    Operation(aten.cat.default, [SQUARE, random(4, 4)]),
    Operation(aten.stack.default, [SQUARE, random(4, 4)], 1),
    Operation(aten.gather.default, SQUARE, 0, indices(4, 4, below=4)),
    Operation(aten.scatter_add.default, SQUARE, 1, indices(4, 4, below=4), random(4, 4)),
    Operation(aten.slice_backward.default, CUBE, [4, 8, 8], 2, 4, 8, 1),
    Operation(aten.select_backward.default, SQUARE, [4, 4, 4], 1, 2),
    Operation(aten.constant_pad_nd.default, CUBE, [0, 0, 1, 1]),
    Operation(aten.native_layer_norm.default, CUBE, [8, 4], random(8, 4), None, 1e-5),
    Operation(aten.mm.default, SQUARE, random(4, 4)),
    Operation(aten.mm.default, SQUARE, SQUARE),
    Operation(aten.bmm.default, random(4, 4, 4), random(4, 4, 4)),
    Operation(aten.addmm.default, random(4), SQUARE, random(4, 4)),
    Operation(aten.addmm.default, SQUARE, SQUARE, random(4, 4)),
    Operation(aten.embedding.default, SQUARE, indices(4, 4, below=4)),
    Operation(aten.embedding_dense_backward.default, CUBE, indices(4, 8, below=5), 5, -1, False),
    Operation(aten.embedding_dense_backward.default, CUBE, indices(4, 8, below=5), 5, -1, True),
    Operation(aten.index.Tensor, SQUARE, [indices(4, 4, below=4), indices(4, below=4)]),
    Operation(aten.index.Tensor, CUBE, [None, indices(4, below=8)]),
]


@st.composite
def states_of(draw: st.DrawFn, value: torch.Tensor) -> State:
    """A state in which a value can be."""
    found: list[State] = [WHOLE, LOCAL]
    if value.is_floating_point():
        found.append(PARTIAL)
    for dim, size in enumerate(value.shape):
        if size % EXTENT == 0:
            rest = size // EXTENT
            found += [sharded(dim, outer=rest), sharded(dim, inner=rest)]
    return draw(st.sampled_from(found))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: str(each.node.target))
@settings(deadline=None)
@given(data=st.data(), sizes=st.sampled_from([(2, 2), (3, 1), (1, 1, 2), (1, 1, 1, 1)]))
def test_no_rule_joins_wrongly(operation: Operation, data: st.DataObject, sizes: tuple[int, ...]):
    states = [data.draw(states_of(node.meta["val"])) for node in operation.operands]
    try:
        wrong = operation.wrong_results(states, sizes)
    except NotProvenError:
        return
    assert wrong == []
    if LOCAL in states:
        found = operation.judge(states).state
        assert all(isinstance(each, Local) for each in as_list(found))
