"""Changes that a step makes to the tensors themselves that it is given, beside their values.

A replay writes values. It does not give a parameter other memory (``parameter.data = ...``),
another shape, an attribute, or another ``requires_grad``. Nor does a trace follow such a change:
the nodes of a tensor stay those of its old memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gt_trace._torch_internals import DisableTorchFunction, storage_key
from gt_trace.capture.flat_inputs import FlatInputs
from gt_trace.capture.input_uses import InputUse
from gt_trace.capture.python_holders import MISSING, short
from gt_trace.capture.python_state import is_same
from gt_trace.capture.stack_traces import line_of_user
from gt_trace.capture.stand_ins import user_attributes
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trace.errors import CaptureError

_DATA: Any = torch.Tensor.data
"""The descriptor of ``tensor.data``, of a base class of ``torch.Tensor``."""

_REMEDY = (
    "write the new values in place (with torch.no_grad(): tensor.copy_(values)), or assign outside "
    "of the step"
)


@contextmanager
def refuse_data_assignments(names: Mapping[int, str]) -> Iterator[None]:
    """Refuse ``tensor.data = ...`` inside, unless it changes nothing.

    In a backward, and where torch functions are disabled, no torch function mode sees it. So
    ``torch.Tensor`` gets a property of this name, in front of the descriptor of its base class.

    Args:
        names: what tensors are to the step, by their ids.

    Raises:
        CaptureError: names the tensor and the line.
    """
    refused: list[str] = []

    def assign(tensor: torch.Tensor, value: object) -> None:
        with DisableTorchFunction():
            same = isinstance(value, torch.Tensor) and _memory(tensor) == _memory(value)
        if not same:
            name = names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")
            refused.append(
                f"{name} is given other memory by an assignment to its .data:\n{line_of_user()}\n"
                f"A graph would go on with the old memory; {_REMEDY}"
            )
            raise CaptureError(refused[0])
        _DATA.__set__(tensor, value)

    outer = vars(torch.Tensor).get("data")
    kind: Any = torch.Tensor
    kind.data = property(_DATA.__get__, assign)
    try:
        yield
    finally:
        if outer is None:
            del kind.data
        else:
            kind.data = outer
    if refused:
        raise CaptureError(refused[0])  # the step caught it, and went on


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTensor:
    """A stand-in, and what it and its live tensor were before the step ran."""

    name: str
    tensor: torch.Tensor
    memory: tuple[Any, ...]
    requires_grad: bool
    names: frozenset[str]
    attributes: dict[str, Any]
    """Those that were set on the live tensor."""

    is_argument: bool
    is_leaf: bool
    has_gradient: bool
    """Whether the live tensor is a leaf, and has a gradient from before."""

    def refuse_stale_gradient(self) -> None:
        """Refuse a step that reads a gradient from before.

        Raises:
            CaptureError: names the tensor and the line.
        """
        if self.has_gradient and self.tensor.grad is None:
            raise CaptureError(
                f"the step reads .grad of {self.name}, which has a gradient from before the "
                f"capture:\n{line_of_user()}\nClear it before the capture (zero_grad()), and pass "
                "gradients that the step needs as arguments"
            )


class GivenTensors:
    """The stand-ins of state and arguments, as they are before the step runs.

    Args:
        flat: what the tensors stand for.
        state: one for each slot.
        leaves: one for each leaf of the arguments; those that are no tensors are skipped.
    """

    def __init__(
        self, flat: FlatInputs, state: Sequence[torch.Tensor], leaves: Sequence[Any]
    ) -> None:
        self.layout_reads: dict[str, set[InputUse]] = {}
        """How Python reads the layout of each input, by what it is to the step."""

        named: list[tuple[str, Any, Any, bool]] = [
            (f"{slot.entry.kind} {slot.entry.name}", tensor, slot.tensor, False)
            for slot, tensor in zip(flat.slots, state, strict=True)
        ]
        named += [
            (f"argument {argument.name}", leaf, argument.leaf, True)
            for argument, leaf in zip(flat.arguments, leaves, strict=False)
        ]
        with DisableTorchFunction():
            self._given = [
                GivenTensor(
                    name=name,
                    tensor=tensor,
                    memory=_memory(tensor),
                    requires_grad=tensor.requires_grad,
                    names=frozenset(tensor.__dict__),
                    attributes={
                        key: value
                        for key, value in user_attributes(original).items()
                        if tensor.__dict__.get(key, MISSING) is value
                    },
                    is_argument=is_argument,
                    is_leaf=original.is_leaf,
                    has_gradient=original.is_leaf and original.grad is not None,
                )
                for name, tensor, original, is_argument in named
                if isinstance(tensor, torch.Tensor)
            ]

    def note_layout_read(self, tensor: torch.Tensor, use: InputUse) -> None:
        """Note that Python reads the layout of ``tensor``, for the inputs whose memory it shares.

        Another tensor lies alike for all strides of inputs that a replay copies.
        """
        with DisableTorchFunction():
            keys = {leaf[0] for leaf in _memory(tensor)}
            base = tensor._base
        for each in self._given:
            if each.tensor is base or any(leaf[0] in keys for leaf in each.memory):
                self.layout_reads.setdefault(each.name, set()).add(use)

    @property
    def names(self) -> dict[int, str]:
        """What each tensor is to the step, by the tensor's id."""
        return {id(each.tensor): each.name for each in self._given}

    @property
    def by_id(self) -> dict[int, GivenTensor]:
        """The stand-ins by their ids."""
        return {id(each.tensor): each for each in self._given}

    def refuse_changes(self) -> None:
        """Refuse a step that changed more than values.

        Raises:
            CaptureError: lists every such change.
        """
        with DisableTorchFunction():
            problems = [problem for each in self._given for problem in _problems(each)]
        if problems:
            raise CaptureError(
                "the step changes tensors in a way that a replay would lose:\n  "
                + "\n  ".join(problems)
            )


def _problems(given: GivenTensor) -> list[str]:
    name, tensor = given.name, given.tensor
    problems: list[str] = []
    if _memory(tensor) != given.memory:
        problems.append(f"{name} was given other memory, another shape or dtype; {_REMEDY}")
    if tensor.requires_grad and not (given.requires_grad or tensor.is_leaf):
        problems.append(
            f"{name} requires a gradient after the step, since it was updated from a tensor that "
            "does; update it under torch.no_grad(), or from detached tensors"
        )
    elif tensor.requires_grad != given.requires_grad:
        change = f"{tensor.requires_grad}, and was {given.requires_grad}"
        problems.append(
            f"{name}.requires_grad is {change}; set it back in the step, or set it outside"
        )
    if given.is_argument and tensor.is_leaf and tensor.grad is not None:
        problems.append(
            f"the .grad of {name} was written; use torch.autograd.grad and return the gradient"
        )
    held = tensor.__dict__
    problems += [
        f"{name} was given the attribute {key}; keep it on a module instead"
        for key in sorted(held.keys() - given.names)
        if not key.startswith("_dynamo")
    ]
    for key, old in given.attributes.items():
        new = held.get(key, MISSING)
        if not is_same(old, new):
            change = "is gone" if new is MISSING else f"became {short(new)}"
            problems.append(
                f"{name}.{key} was {short(old)}, and {change}; count in a buffer (add_), or "
                "outside of the step"
            )
    return problems


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how; equal for two tensors that are one in all but autograd."""
    return tuple(
        (
            storage_key(leaf) if leaf.layout is torch.strided else id(leaf),
            id(getattr(leaf, "elem", None)),  # what a functional tensor of AOTAutograd holds
            tuple(leaf.shape),
            *((tuple(leaf.stride()), leaf.storage_offset()) * (leaf.layout is torch.strided)),
            leaf.dtype,
        )
        for leaf in flatten_tensor(tensor)[0]
    )
