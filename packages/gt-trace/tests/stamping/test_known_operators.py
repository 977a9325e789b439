"""Operators answered from memory give what dispatching them gives, or are dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from gt_trace._torch_internals import FakeTensorMode, ShapeEnv, TorchDispatchMode, storage_key
from gt_trace.capture.fake_tensors import tensors_in
from gt_trace.stamping.known_operators import KnownOperators, is_stateless
from gt_trace.stamping.known_sizes import SegmentSizes

aten = torch.ops.aten

ANSWERED: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "product": (aten.mm.default, lambda: [torch.rand(4, 6), torch.rand(6, 3)]),
    "transposed": (aten.t.default, lambda: [torch.rand(4, 6)]),
    "slice": (aten.slice.Tensor, lambda: [torch.rand(4, 6), 1, 2, 5]),
    "pieces": (aten.split.Tensor, lambda: [torch.rand(4, 6), 2, 1]),
    "view of a view": (aten.view.default, lambda: [torch.rand(4, 6)[1:], [18]]),
    "of another dtype": (
        aten.view_as_real.default,
        lambda: [torch.zeros(3, dtype=torch.complex64)],
    ),
    "other dtype": (aten._to_copy.default, lambda: [torch.rand(4, 6).t()]),
    "several": (
        aten.native_layer_norm.default,
        lambda: [torch.rand(4, 6), [6], torch.rand(6), torch.rand(6), 1e-5],
    ),
    "rows by number": (aten.index.Tensor, lambda: [torch.rand(4, 6), [torch.tensor([2, 0])]]),
    "no operand": (aten.zeros.default, lambda: [[4]]),
    "broadcast": (aten.expand.default, lambda: [torch.rand(4, 1), [4, 6]]),
}

DISPATCHED: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "writes": (aten.add_.Tensor, lambda: [torch.rand(4), torch.rand(4)]),
    "draws": (aten.rand_like.default, lambda: [torch.rand(4)]),
    "gives a number": (aten.item.default, lambda: [torch.rand(())]),
    "sizes by value": (aten.nonzero.default, lambda: [torch.rand(4)]),
    "gives a lazy conjugate": (aten._conj.default, lambda: [torch.rand(4, dtype=torch.complex64)]),
    "rows by a mask": (aten.index.Tensor, lambda: [torch.rand(4), [torch.rand(4) > 0]]),
    "takes a lazy conjugate": (
        aten.mul.Tensor,
        lambda: [torch.rand(4, dtype=torch.complex64).conj(), torch.rand(4)],
    ),
    "an operand whose value is known": (aten.neg.default, lambda: [torch.tensor(2)]),
}


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(shape_env=ShapeEnv()) as fake_mode:
        yield fake_mode


def asked_twice(func: Any, args: list[Any], mode: FakeTensorMode) -> tuple[Any, Any, list[Any]]:
    """The operator's result, the answer to the same question, and the operands."""
    known = KnownOperators({}, mode)
    operands = tensors_in(args)
    question = known.question(func, 0, operands)
    result = func(*args)
    if question is None:
        return result, None, operands
    assert known.answer(question, operands) is None
    known.learn(question, operands, result)
    return result, known.answer(question, operands), operands


def facts(tensor: torch.Tensor, operands: list[torch.Tensor]) -> tuple[Any, ...]:
    memory = [storage_key(tensor) == storage_key(operand) for operand in operands]
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.untyped_storage().nbytes(),
        memory,
    )


@pytest.mark.parametrize("name", ANSWERED)
def test_answer_is_what_the_operator_gives(name: str, mode: FakeTensorMode) -> None:
    func, make = ANSWERED[name]
    result, answer, operands = asked_twice(func, make(), mode)
    assert type(answer) is type(result)
    results, answers = (
        [each] if isinstance(each, torch.Tensor) else list(each) for each in (result, answer)
    )
    assert [facts(each, operands) for each in answers] == [
        facts(each, operands) for each in results
    ]
    assert not any(one is other for one, other in zip(answers, results, strict=True))


@pytest.mark.parametrize("name", DISPATCHED)
def test_what_depends_on_more_is_dispatched(name: str, mode: FakeTensorMode) -> None:
    func, make = DISPATCHED[name]
    assert asked_twice(func, make(), mode)[1] is None


def test_nothing_is_answered_where_another_mode_would_see_it(mode: FakeTensorMode) -> None:
    x = torch.rand(4)
    with TorchDispatchMode():  # type: ignore[no-untyped-call]  # torch's
        known = KnownOperators({}, mode)
        assert known.question(aten.neg.default, 0, [x]) is None
    assert KnownOperators({}, mode).question(aten.neg.default, 0, [x]) is not None


def test_sizes_known_at_run_time_only_are_not_answered(mode: FakeTensorMode) -> None:
    x = torch.nonzero(torch.rand(4))
    assert asked_twice(aten.neg.default, [x], mode)[1] is None


def test_layouts_with_a_state_of_their_own_are_not_answered() -> None:
    class Masked(Partial):
        """As the layout of a lookup in a sharded vocabulary, which keeps a mask."""

    assert is_stateless(None)
    assert is_stateless(SimpleNamespace(placements=(Shard(0), Replicate(), Partial())))
    assert not is_stateless(SimpleNamespace(placements=(Shard(0), Masked())))


def counted_rows() -> tuple[torch.Tensor, SegmentSizes]:
    """A tensor with a size that only a run will tell, and the names of a segment that reads it."""
    rows = torch.rand(4).nonzero()
    sizes = SegmentSizes()
    sizes.text(rows.shape[0])
    return rows, sizes


def expressions(tensor: torch.Tensor) -> list[str]:
    numbers = (*tensor.shape, *tensor.stride(), tensor.untyped_storage().nbytes())
    return [str(each) for each in numbers]


def test_answer_has_the_symbols_of_its_own_segment(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    (ours, our_sizes), (theirs, their_sizes) = counted_rows(), counted_rows()
    question = known.question(aten.neg.default, 0, [ours], our_sizes)
    known.learn(question, [ours], aten.neg.default(ours), our_sizes)
    assert known.question(aten.neg.default, 0, [theirs], their_sizes) == question
    answer = known.answer(question, [theirs], their_sizes)
    assert expressions(answer) == expressions(aten.neg.default(theirs))
    assert expressions(answer)[0] == "u1"


def test_size_of_which_more_is_known_is_another_question(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    (_, our_sizes), (theirs, their_sizes) = counted_rows(), counted_rows()
    torch._check(theirs.shape[0] >= 2)
    questions = [
        known.question(aten.neg.default, 0, [], sizes) for sizes in (our_sizes, their_sizes)
    ]
    assert questions[0] != questions[1]


def test_operator_that_tells_that_a_size_is_a_number_runs_each_time(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    (ours, our_sizes), (theirs, their_sizes) = counted_rows(), counted_rows()
    three = torch.rand(3, 1)
    question = known.question(aten.add.Tensor, 0, [ours, three], our_sizes)
    known.learn(question, [ours, three], aten.add.Tensor(ours, three), our_sizes)
    assert known.question(aten.add.Tensor, 0, [theirs, three], their_sizes) == question
    assert known.answer(question, [theirs, three], their_sizes) is None


def test_repeated_rows_are_answered_where_the_caller_says_how_many(mode: FakeTensorMode) -> None:
    known = KnownOperators({}, mode)
    repeat, counts = aten.repeat_interleave.Tensor, torch.tensor([2, 3]).neg()
    assert known.question(repeat, 0, [counts]) is None
    question = known.question(repeat, 0, [counts], is_sized=True)
    known.learn(question, [counts], repeat(counts, output_size=5))
    assert known.answer(question, [counts]).shape == (5,)
