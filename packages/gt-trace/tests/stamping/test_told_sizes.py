"""What an operator tells PyTorch of sizes is told of another layer's in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gt_trace._torch_internals import FakeTensorMode, ShapeEnv
from gt_trace.stamping.known_operators import KnownOperators
from gt_trace.stamping.known_sizes import SegmentSizes

_NUM_SIZES = 6


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(shape_env=ShapeEnv()) as fake_mode:
        yield fake_mode


def sums_of_sizes() -> tuple[list[torch.Tensor], SegmentSizes]:
    """Two tensors of as many rows as different sums of sizes say, as routed tokens have."""
    counts = torch.zeros(2 * _NUM_SIZES, dtype=torch.int64).tolist()
    sizes = SegmentSizes()
    for each in counts:
        torch._check(each >= 0)
        sizes.text(each)
    halves = counts[:_NUM_SIZES], counts[_NUM_SIZES:]
    return [torch.rand(sum(half), 4) for half in halves], sizes


def same_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.ops.aten.mul.Tensor(*tensors)


def known_of(mode: FakeTensorMode, sizes: SegmentSizes) -> Any:
    """All that the environment holds of the symbols of a segment, in the segment's words."""
    env: Any = mode.shape_env
    own = sizes.names.keys()

    def told(expression: Any) -> str:
        return str(expression.xreplace({s: s.func(f"n{n[4:]}") for s, n in sizes.names.items()}))

    return (
        {n: env.var_to_range[symbol] for symbol, n in sizes.names.items()},
        sorted(
            told(each.expr)
            for listed in env.deferred_runtime_asserts.values()
            for each in listed
            if each.expr.free_symbols & own
        ),
        {told(each): truth for each, truth in env.axioms.items() if each.free_symbols & own},
        [told(s) for s, listed in env.deferred_runtime_asserts.items() if s in own for _ in listed],
    )


def ask(
    known: KnownOperators, run: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[torch.Tensor, bool, SegmentSizes]:
    """One segment that asks; its result, whether that was answered, and its sizes."""
    tensors, sizes = sums_of_sizes()
    question = known.question(torch.ops.aten.mul.Tensor, 0, tensors, sizes)
    answer = known.answer(question, tensors, sizes)
    if answer is not None:
        return answer, True, sizes
    before = known.before(question, sizes)
    result = run(tensors)
    known.learn(question, tensors, result, sizes, before)
    return result, False, sizes


def sizes_of(tensor: torch.Tensor, sizes: SegmentSizes) -> list[str]:
    numbers = [*tensor.shape, *tensor.stride(), tensor.untyped_storage().nbytes(), tensor.numel()]
    return [each if isinstance(each, int) else sizes.text(each) for each in numbers]


def test_what_an_operator_told_is_told_again(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    first, was_answered, first_sizes = ask(known, same_rows)
    assert not was_answered
    second, was_answered, second_sizes = ask(known, same_rows)
    assert was_answered
    # and a third time without memory, as the operator itself tells it
    third, was_answered, third_sizes = ask(KnownOperators({}, mode), same_rows)
    assert not was_answered
    assert known_of(mode, second_sizes) == known_of(mode, third_sizes)
    assert known_of(mode, second_sizes) == known_of(mode, first_sizes)
    assert (
        sizes_of(first, first_sizes)
        == sizes_of(second, second_sizes)
        == sizes_of(third, third_sizes)
    )
    facts = [known._sizes.facts(each) for each in (first_sizes, second_sizes, third_sizes)]
    assert facts[0] == facts[1] == facts[2]


def test_a_layer_that_is_told_more_asks_another_question(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    ask(known, same_rows)
    tensors, sizes = sums_of_sizes()
    torch._check(tensors[0].shape[0] <= 4096)
    question = known.question(torch.ops.aten.mul.Tensor, 0, tensors, sizes)
    assert known.answer(question, tensors, sizes) is None


def test_what_is_told_of_a_size_of_another_segment_runs_each_time(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    others, _ = sums_of_sizes()

    def with_another(tensors: list[torch.Tensor]) -> torch.Tensor:
        torch._check(others[0].shape[0] >= tensors[0].shape[0])
        return same_rows(tensors)

    assert not ask(known, with_another)[1]
    assert not ask(known, with_another)[1]


def test_a_size_that_turns_out_to_be_a_number_runs_each_time(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    env: Any = mode.shape_env

    def one_is_three(tensors: list[torch.Tensor]) -> torch.Tensor:
        last: Any = max(tensors[0].shape[0].node.expr.free_symbols, key=str)  # type: ignore[union-attr]
        torch._check(env.create_symintnode(last, hint=None) == 3)
        return same_rows(tensors)

    assert not ask(known, one_is_three)[1]
    assert not ask(known, one_is_three)[1]
