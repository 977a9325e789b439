"""Operators of a recording answered from what they gave for the same operands before.

The layers of a deep model run the same operators on tensors of the same sizes, over and over, and
on fake tensors the result of most is known from these alone. An answer is made only where nothing
else can matter: for functional operators of PyTorch itself, on tensors whose sizes are numbers, of
which every fact that an operator can see is part of the question. The answers are new tensors, in
memory of their own or in that of the operand of which the result is a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

_STATELESS = (Replicate, Shard, Partial, StridedShard)


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an operator returned, without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    operand: int | None
    """Position of the operand of which the tensor is a view; None for memory of its own."""

    spec: Any
    """Mesh and placements of a DTensor; None for a fake tensor."""


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: type
    """``torch.Tensor`` where the operator returned a single one, else the class of the sequence."""

    results: tuple[_Result, ...]


Answers: TypeAlias = dict[Any, _Answer | None]
"""What operators gave, by question; None where an answer cannot be made. Shared by recordings that
are compared."""


class KnownOperators:
    """Answers operators of one recording, of that fake mode, also by those of earlier ones."""

    def __init__(self, answers: Answers, mode: FakeTensorMode) -> None:
        self._answers = answers
        self._mode = mode
        # Another mode than that of the fake tensors would have to see the operators too.
        self._is_off = num_dispatch_modes() > 1

    def question(self, func: Any, token: int, operands: Sequence[torch.Tensor]) -> Any:
        """What the result is known by; None if it depends on more.

        ``token`` stands for the operator, its constants, and all facts of its operands.
        """
        if self._is_off or not is_functional(func):
            return None
        return (token, torch.get_default_dtype(), torch.is_inference_mode_enabled())

    def answer(self, question: Any, operands: Sequence[torch.Tensor]) -> Any:
        """The result of a question, as if the operator had run; None if it must run."""
        known = self._answers.get(question)
        if known is None:
            return None
        made = [self._tensor(each, operands) for each in known.results]
        return made[0] if known.kind is torch.Tensor else known.kind(made)

    def learn(self, question: Any, operands: Sequence[torch.Tensor], result: Any) -> None:
        """Remember what an operator gave."""
        if question not in self._answers:
            self._answers[question] = self._answer_of(result, operands)

    def another(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Another tensor in the same memory, as if it were detached; None if that must run."""
        if self._is_off or not self._is_plain(tensor):
            return None
        return self._tensor(_result(tensor, 0), [tensor])

    def _answer_of(self, result: Any, operands: Sequence[torch.Tensor]) -> _Answer | None:
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
            found = _result(tensor, memory.get(key))
            if found != _result(self._tensor(found, operands), found.operand):
                return None
            results.append(found)
        own = {storage_key(_local(each)) for each in tensors} - memory.keys()
        if len(own) < sum(each.operand is None for each in results):
            return None
        return _Answer(torch.Tensor if is_single else type(result), tuple(results))

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """A fake tensor of this recording with sizes that are numbers, or a DTensor of one."""
        local = _local(tensor) if type(tensor) is DTensor else tensor
        return (
            type(local) is FakeTensor
            and local.fake_mode is self._mode
            and local.constant is None
            and local.dispatch_keys is None
            and local.layout is torch.strided
            and not local._has_symbolic_sizes_strides
            and not tensor._has_symbolic_sizes_strides
            and not tensor.is_conj()
            and not tensor.is_neg()
            and is_stateless(getattr(tensor, "_spec", None))
        )

    def _tensor(self, result: _Result, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        with no_dispatch():
            if result.operand is None:
                element = torch.empty_strided(
                    result.shape, result.stride, dtype=result.dtype, device="meta"
                )
            else:
                memory = _local(operands[result.operand]).untyped_storage()
                element = torch.empty((0,), dtype=result.dtype, device="meta")
                element.set_(memory, result.offset, result.shape, result.stride)
        fake = fake_over_meta(element, self._mode, result.device, dispatch_keys=None)
        return fake if result.spec is None else dtensor_over(fake, result.spec)


def is_stateless(spec: Any) -> bool:
    """Whether a layout is all in its placements; masks of sharded vocabularies are not."""
    return spec is None or all(type(each) in _STATELESS for each in spec.placements)


def _local(tensor: torch.Tensor) -> Any:
    """The part of this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def _result(tensor: torch.Tensor, operand: int | None) -> _Result:
    local = _local(tensor)
    return _Result(
        shape=tuple(local.shape),
        stride=tuple(local.stride()),
        offset=local.storage_offset(),
        dtype=local.dtype,
        device=local.device,
        num_bytes=local.untyped_storage().nbytes(),
        operand=operand,
        spec=getattr(tensor, "_spec", None),
    )
