"""What rules say of collectives holds on the values of two ranks, chunk by chunk, or they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ep_overlap.test_chunk_rules import EXTENT, Operation

from gt_passes.ep_overlap.chunk_rules import find_rule
from gt_passes.ep_overlap.chunk_states import Layout, Partial, Sharded, State, Whole
from gt_passes.ep_overlap.rule_calls import NotProvenError, RuleCall, RuleOutcome, Scaled

aten = torch.ops.aten
functional = torch.ops._c10d_functional
SIZES = (1, 3)
X = torch.linspace(0, 1, 2 * EXTENT * 3 * 5, dtype=torch.float64).view(2 * EXTENT, 3, 5)


def gather(x: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    return torch.cat([x, 3 * x])  # three times this rank's is what the other has


def scatter(x: torch.Tensor, reduce_op: str, group_size: int, group: str) -> torch.Tensor:
    return (x + 3 * x).chunk(group_size)[0]


def reduce(x: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
    return x + 3 * x


class OfTwoRanks(Operation):
    """A collective, and what it computes on one of two ranks."""

    def __init__(self, operator: Any, computes: Callable[..., torch.Tensor], *args: Any) -> None:
        super().__init__(computes, *args)
        self._operator = operator

    def judge(self, states: list[State]) -> RuleOutcome:
        computes, self.node.target = self.node.target, self._operator
        try:
            return super().judge(states)
        finally:
            self.node.target = computes


GATHER = functional.all_gather_into_tensor.default, gather, X, 2, "tp"
SCATTER = functional.reduce_scatter_tensor.default, scatter, X, "sum", 2, "tp"
REDUCE = functional.all_reduce.default, reduce, X, "sum", "tp"
TWICE = Sharded(Layout(dim=0, outer=2))
ONCE = Sharded(Layout(dim=0, inner=2))


@pytest.mark.parametrize(
    ("collective", "state", "expected"),
    [
        (GATHER, ONCE, Sharded(Layout(dim=0, outer=2, inner=2))),
        (GATHER, TWICE, Sharded(Layout(dim=0, outer=4))),
        (GATHER, Partial(), Partial()),
        (GATHER, Whole(), Whole()),
        (SCATTER, TWICE, Sharded(Layout(dim=0))),
        (SCATTER, Partial(), Partial()),
        (REDUCE, ONCE, ONCE),
        (REDUCE, Partial(), Partial()),
    ],
)
def test_collectives_of_chunks_are_chunks_of_collectives(
    collective: tuple[Any, ...], state: State, expected: State
) -> None:
    operation = OfTwoRanks(*collective)
    assert operation.judge([state]).state == expected
    assert operation.wrong_results([state], SIZES) == []


@pytest.mark.parametrize(
    ("collective", "state", "reason"),
    [
        (SCATTER, ONCE, "it works along dim 0, which is chunked"),
        ((*REDUCE[:3], "max", "tp"), Partial(), "it is not linear, and its operand is only a term"),
        ((*SCATTER[:3], "min", 2, "tp"), Partial(), "it is not linear"),
    ],
)
def test_refuses_what_chunks_would_change(
    collective: tuple[Any, ...], state: State, reason: str
) -> None:
    with pytest.raises(NotProvenError, match=reason):
        OfTwoRanks(*collective).judge([state])


def test_what_was_gathered_is_cut_between_walks_and_joined_along_another_dimension() -> None:
    cut = Operation(aten.split.Tensor, X, EXTENT, 0)
    assert cut.judge([TWICE]).state == (Sharded(Layout(dim=0)),) * 2
    assert cut.wrong_results([TWICE], SIZES) == []
    joined = Operation(aten.cat.default, list(X.split(EXTENT)), 1)
    assert joined.judge([Sharded(Layout(dim=0))] * 2).state == Sharded(Layout(dim=0))


@pytest.mark.parametrize(("start", "end", "outer"), [(0, EXTENT, 1), (EXTENT, 2**63 - 1, 3)])
def test_of_what_was_gathered_a_rank_takes_walks_that_are_its_own(
    start: int, end: int, outer: int
) -> None:
    taken = Operation(aten.slice.Tensor, torch.cat([X, X + 1]), 0, start, end)
    states: list[State] = [Sharded(Layout(dim=0, outer=4))]
    assert taken.judge(states).state == Sharded(Layout(dim=0, outer=outer))
    assert taken.wrong_results(states, SIZES) == []


@pytest.mark.parametrize(("start", "end"), [(EXTENT, 3 * EXTENT), (2 * EXTENT, 2**63 - 1)])
def test_gradients_of_walks_that_a_rank_took_stand_among_zeros(start: int, end: int) -> None:
    among = Operation(aten.slice_backward.default, X, [4 * EXTENT, 3, 5], 0, start, end, 1)
    assert among.judge([TWICE]).state == Sharded(Layout(dim=0, outer=4))
    assert among.wrong_results([TWICE], SIZES) == []


def test_what_will_be_scattered_is_joined_walk_by_walk() -> None:
    joined = Operation(aten.cat.default, [*X.split(EXTENT), X], 0)
    states: list[State] = [Sharded(Layout(dim=0)), Sharded(Layout(dim=0)), TWICE]
    assert joined.judge(states).state == Sharded(Layout(dim=0, outer=4))
    assert joined.wrong_results(states, SIZES) == []


@pytest.mark.parametrize(
    "operation",
    [
        Operation(aten.split.Tensor, X, 2, 0),
        Operation(aten.split.Tensor, X, 3, 0),
        Operation(aten.slice.Tensor, X, 0, 0, EXTENT - 1),
        Operation(aten.slice.Tensor, X, 0, 0, 2 * EXTENT, 2),
        Operation(aten.slice_backward.default, X, [4 * EXTENT, 3, 5], 0, 1, 1 + 2 * EXTENT, 1),
        Operation(aten.slice_backward.default, X, [4 * EXTENT, 3, 5], 0, 0, 4 * EXTENT, 2),
    ],
    ids=[
        "half a walk",
        "uneven",
        "less than a walk",
        "every second",
        "gradients between walks",
        "gradients of every second",
    ],
)
def test_refuses_to_cut_within_a_walk(operation: Operation) -> None:
    with pytest.raises(NotProvenError, match="it works along dim 0, which is chunked"):
        operation.judge([TWICE])


def test_refuses_to_join_unlike_walks() -> None:
    joined = Operation(aten.cat.default, [X, X + 1], 0)
    with pytest.raises(NotProvenError, match="along"):
        joined.judge([TWICE, ONCE])


def test_constants_of_a_whole_sequence_hold_the_extent_of_its_parts() -> None:
    """The backward of a read of (B, L / ranks, E) begins with zeros of (B, L, E)."""
    index = torch.zeros(2 * EXTENT, 3, 1, dtype=torch.int64)
    read = Operation(aten.gather.default, X, 2, index)
    zeros = Operation(aten.new_zeros.default, X, [2 * EXTENT, 6, 5])
    call = RuleCall(
        node=zeros.node,
        outcomes={read.operands[0]: RuleOutcome(state=ONCE)},
        extent=EXTENT,
        partner=read.node,
    )
    rule = find_rule(zeros.node)
    assert rule is not None
    assert rule(call) == RuleOutcome(state=ONCE, args=(zeros.operands[0], [Scaled(2), 6, 5]))
