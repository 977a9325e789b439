"""Operators of a recording answered from what they gave for the same operands before.

The layers of a deep model run the same operators on tensors of the same sizes, over and over, and
on fake tensors the result of most is known from these alone. An answer is made only where nothing
else can matter: for functional operators of PyTorch itself, on tensors whose sizes are numbers, of
which every fact that an operator can see is part of the question. The answers are new tensors, in
memory of their own or in that of the operand of which the result is a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from gt_trace._torch_internals import (
    DTensor,
    FakeTensor,
    FakeTensorMode,
    StridedShard,
    dtensor_over,
    fake_over_meta,
    is_functional,
    no_dispatch,
    num_dispatch_modes,
    storage_key,
)
from gt_trace.stamping.known_sizes import (
    KnownBefore,
    KnownSizes,
    SegmentSizes,
    ToldSizes,
    expression_of,
)
from gt_trace.stamping.long_sums import LongSums

_STATELESS = (Replicate, Shard, Partial, StridedShard)


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an operator returned; its sizes are numbers or expressions."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    num_bytes: Any
    numel: Any
    operand: int | None
    """Position of the operand of which the tensor is a view; None for memory of its own."""

    spec: Any
    """Mesh and placements of a DTensor; None for a fake tensor."""

    names: tuple[tuple[Any, str], ...] = ()
    """The symbols in the expressions, and what they are called in the segment."""


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: type
    """``torch.Tensor`` where the operator returned a single one, else the class of the sequence."""

    results: tuple[_Result, ...]

    told: ToldSizes | None = None
    """What the operator told PyTorch of sizes; told again when it is answered."""

    names: tuple[tuple[Any, str], ...] = ()
    """The symbols of which that is told, and what they are called in the segment."""


Answers: TypeAlias = dict[Any, _Answer | None]
"""What operators gave, by question; None where an answer cannot be made. Shared by recordings that
are compared."""


class KnownOperators:
    """Answers operators of one recording, of that fake mode, also by those of earlier ones.

    Where an operator read sizes that only a run will tell, those of its segment are passed along:
    the symbols differ from segment to segment, and what is known of them is a part of the question.
    """

    def __init__(self, answers: Answers, mode: FakeTensorMode) -> None:
        self._answers = answers
        self._mode = mode
        self._sizes = KnownSizes(mode.shape_env)
        self._long_sums = LongSums(mode.shape_env)
        # Another mode than that of the fake tensors would have to see the operators too.
        self._is_off = num_dispatch_modes() > 1

    def question(
        self,
        func: Any,
        token: int,
        operands: Sequence[torch.Tensor],
        sizes: SegmentSizes | None = None,
        *,
        is_sized: bool = False,
    ) -> Any:
        """What the result is known by; None if it depends on more.

        ``token`` stands for the operator, its constants, and all facts of its operands;
        ``is_sized`` says that the caller of a ``repeat_interleave`` told how long its result is.
        """
        if self._is_off or not (
            is_functional(func)
            or _is_selection_by_number(func, operands)
            or (func is torch.ops.aten.repeat_interleave.Tensor and is_sized)
        ):
            return None
        facts = None if sizes is None else self._sizes.facts(sizes)
        return (token, torch.get_default_dtype(), torch.is_inference_mode_enabled(), facts)

    def answer(
        self, question: Any, operands: Sequence[torch.Tensor], sizes: SegmentSizes | None = None
    ) -> Any:
        """The result of a question, as if the operator had run; None if it must run."""
        known = self._answers.get(question)
        if known is None:
            return None
        if known.told is not None:
            assert sizes is not None  # it has read some
            self._sizes.tell(known.told, known.names, sizes)
        made = [self._tensor(each, operands, sizes) for each in known.results]
        return made[0] if known.kind is torch.Tensor else known.kind(made)

    def before(self, question: Any, sizes: SegmentSizes | None) -> KnownBefore | None:
        """What ``learn`` compares with, of an operator that reads sizes; None if not needed."""
        if question is None or sizes is None or question in self._answers:
            return None
        return self._sizes.before()

    def learn(
        self,
        question: Any,
        operands: Sequence[torch.Tensor],
        result: Any,
        sizes: SegmentSizes | None = None,
        before: KnownBefore | None = None,
    ) -> None:
        """Remember what an operator gave, and what it told PyTorch of ``sizes`` since ``before``.

        One that tells more than can be told again must run each time.
        """
        if question in self._answers:
            return
        has_told = sizes is not None and self._sizes.facts(sizes) != question[-1]
        told = before.told_since(sizes.names) if has_told and sizes and before else None
        answer = None
        if told is not None or not has_told:
            answer = self._answer_of(result, operands, sizes)
        if answer is not None and told is not None and sizes is not None:
            answer = replace(answer, told=told, names=tuple(sizes.names.items()))
        self._answers[question] = answer

    def another(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Another tensor in the same memory, as if it were detached; None if that must run."""
        if self._is_off or not self._is_plain(tensor) or tensor._has_symbolic_sizes_strides:
            return None
        return self._tensor(_result(tensor, 0), [tensor], None)

    def _answer_of(
        self, result: Any, operands: Sequence[torch.Tensor], sizes: SegmentSizes | None
    ) -> _Answer | None:
        if not all(self._is_plain(operand) for operand in operands):
            return None
        is_single = isinstance(result, torch.Tensor)
        if not is_single and type(result) not in (list, tuple):
            return None
        tensors = [result] if is_single else list(result)
        if any(tensor is operand for tensor in tensors for operand in operands):
            return None
        memory = {storage_key(_local(each)): index for index, each in enumerate(operands)}
        results: list[_Result] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not self._is_plain(tensor):
                return None
            key = storage_key(_local(tensor))
            if sum(storage_key(_local(each)) == key for each in operands) > 1:
                return None  # of which of them the result is a view, is not known
            found = _with_names(_result(tensor, memory.get(key)), sizes)
            if found is None:
                return None
            made = _result(self._tensor(found, operands, sizes), found.operand)
            if found != _with_names(made, sizes):
                return None
            results.append(found)
        own = {storage_key(_local(each)) for each in tensors} - memory.keys()
        if len(own) < sum(each.operand is None for each in results):
            return None
        return _Answer(torch.Tensor if is_single else type(result), tuple(results))

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """A fake tensor of this recording, or a DTensor of one with sizes that are numbers."""
        local = _local(tensor) if type(tensor) is DTensor else tensor
        return (
            type(local) is FakeTensor
            and local.fake_mode is self._mode
            and local.constant is None
            and local.dispatch_keys is None
            and local.layout is torch.strided
            and (local is tensor or not local._has_symbolic_sizes_strides)
            and (local is tensor or not tensor._has_symbolic_sizes_strides)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and is_stateless(getattr(tensor, "_spec", None))
        )

    def _tensor(
        self, result: _Result, operands: Sequence[torch.Tensor], sizes: SegmentSizes | None
    ) -> torch.Tensor:
        with no_dispatch():
            if result.operand is None:
                element = self._in_new_memory(result, sizes)
            else:
                shape, stride, offset = result.shape, result.stride, result.offset
                if result.names:
                    assert sizes is not None
                    *told, offset = (
                        self._sizes.size(each, result.names, sizes)
                        for each in (*shape, *stride, offset)
                    )
                    shape, stride = tuple(told[: len(shape)]), tuple(told[len(shape) :])
                memory = _local(operands[result.operand]).untyped_storage()
                element = torch.empty((0,), dtype=result.dtype, device="meta")
                element.set_(memory, offset, shape, stride)
        fake = fake_over_meta(element, self._mode, result.device, dispatch_keys=None)
        return fake if result.spec is None else dtensor_over(fake, result.spec)

    def _in_new_memory(self, result: _Result, sizes: SegmentSizes | None) -> torch.Tensor:
        """A tensor on meta; no fact is asked of long sums of sizes while it is made."""
        if not result.names:
            shape, stride = result.shape, result.stride
            return torch.empty_strided(shape, stride, dtype=result.dtype, device="meta")
        assert sizes is not None
        renaming, sums = sizes.renaming(result.names), self._long_sums
        made: list[Any] = [
            each if isinstance(each, int) else sums.size(renaming(each))
            for each in (*result.shape, *result.stride)
        ]
        num_dims = len(result.shape)
        element = torch.empty_strided(
            made[:num_dims], made[num_dims:], dtype=result.dtype, device="meta"
        )
        derived: list[tuple[Any, Any]] = [
            (element.untyped_storage().nbytes(), result.num_bytes),
            (element.numel(), result.numel),
        ]
        for size, told in derived:
            if isinstance(size, torch.SymInt):
                sums.remember(size, renaming(told))
        sums.settle()
        return element


def is_stateless(spec: Any) -> bool:
    """Whether a layout is all in its placements; masks of sharded vocabularies are not."""
    return spec is None or all(type(each) in _STATELESS for each in spec.placements)


def _is_selection_by_number(func: Any, operands: Sequence[torch.Tensor]) -> bool:
    """Whether an operator is ``x[indices]``, of which masks alone give as many as values say."""
    return func is torch.ops.aten.index.Tensor and all(
        indices.dtype in (torch.int64, torch.int32) for indices in operands[1:]
    )


def _local(tensor: torch.Tensor) -> Any:
    """The part of this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def _result(tensor: torch.Tensor, operand: int | None) -> _Result:
    local = _local(tensor)
    return _Result(
        shape=tuple(map(expression_of, local.shape)),
        stride=tuple(map(expression_of, local.stride())),
        offset=expression_of(local.storage_offset()),
        dtype=local.dtype,
        device=local.device,
        num_bytes=expression_of(local.untyped_storage().nbytes()),
        numel=expression_of(local.numel()),
        operand=operand,
        spec=getattr(tensor, "_spec", None),
    )


def _with_names(result: _Result, sizes: SegmentSizes | None) -> _Result | None:
    """The result with names of its symbols; None if one of them has none in the segment."""
    numbers = (*result.shape, *result.stride, result.offset, result.num_bytes, result.numel)
    symbols = {symbol for each in numbers if type(each) is not int for symbol in each.free_symbols}
    if not symbols:
        return result
    if sizes is None or not symbols <= sizes.names.keys():
        return None
    names = [(symbol, name) for symbol, name in sizes.names.items() if symbol in symbols]
    return replace(result, names=tuple(names))
