"""What is compared and hashed of a recorded value: everything about a tensor but its contents.

A signature is a tree of plain hashable values. Symbolic sizes stand for themselves as expressions,
so that comparing signatures adds no guards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch

from gt_passes._torch_internals import device_of, layout_of


class TensorSignature(NamedTuple):
    """All that decides which elements of its storage a tensor addresses, and as what."""

    shape: tuple[Hashable, ...]
    stride: tuple[Hashable, ...] | None  # None: not a strided tensor
    storage_offset: Hashable
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    is_conj: bool
    is_neg: bool


class _Symbolic(NamedTuple):
    """A symbolic size: its expression."""

    expression: Hashable


class _ScriptObject(NamedTuple):
    """An object of a C++ class that PyTorch's operators return: its class."""

    class_name: str

    def __repr__(self) -> str:
        return f"an object of the class {self.class_name}"


class _Opaque:
    """Some object, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"an object of type {type(self.value).__name__}"


def signature(value: object) -> Hashable:
    """The signature of a recorded value: a tensor, a number, or a tree of them."""
    if isinstance(value, torch.Tensor):
        return _tensor_signature(value)
    if isinstance(value, (tuple, list)):
        return tuple(signature(item) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _Symbolic(value.node.expr)
    if isinstance(value, (bool, int, float, complex)):
        return (type(value), value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject):
        # Operators that return one (profiler.record_function) make a new one each time.
        return _ScriptObject(value._type().qualified_name())
    # Subgraphs, process groups, generators: the same only as themselves. The object and not its id,
    # which another object could have tomorrow.
    return _Opaque(value)


def tensor_facts(value: object) -> tuple[object, ...] | None:
    """All that the signature of a tensor, or of several, says: quicker to make and to compare.

    It cannot be hashed if a size is symbolic.

    Returns:
        None for what is no strided tensor.
    """
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (tuple, list)):
            return None
        facts = tuple(map(tensor_facts, value))
        return None if None in facts else ("several", *facts)
    if layout_of(value) is not torch.strided:
        return None
    return (
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.dtype,
        device_of(value),
        value.is_conj(),
        value.is_neg(),
    )


def is_symbolic(signed: Hashable) -> bool:
    """Whether a signature contains a symbolic size."""
    if isinstance(signed, _Symbolic):
        return True
    return isinstance(signed, tuple) and any(map(is_symbolic, signed))


def symbols_of(signed: Hashable) -> Iterator[str]:
    """The names of the symbols in a signature, in a fixed order; some may come twice."""
    if isinstance(signed, _Symbolic):
        expression: Any = signed.expression
        yield from sorted(map(str, expression.free_symbols))
    elif isinstance(signed, tuple):
        for part in signed:
            yield from symbols_of(part)


def is_row_major(signed: Hashable) -> bool:
    """Whether the elements of a tensor surely lie one after the other, in row-major order.

    Told by the expressions of sizes and strides alone, which adds no guards.
    """
    if not isinstance(signed, TensorSignature) or signed.stride is None:
        return False
    expected: Any = 1
    for size, stride in reversed(list(zip(signed.shape, signed.stride, strict=True))):
        if size == 1:
            continue
        if _without_lower_bounds(stride) != expected:
            return False
        expected = expected * _without_lower_bounds(size)
    return True


def _without_lower_bounds(size: Hashable) -> Any:
    """A size or stride with n for Max(1, n): they differ in empty tensors only."""
    if not isinstance(size, _Symbolic):
        return size
    expression: Any = size.expression

    def is_lower_bound(part: Any) -> bool:
        return type(part).__name__ == "Max" and len(part.args) == 2 and 1 in part.args

    def bounded(part: Any) -> Any:
        return next(argument for argument in part.args if argument != 1)

    return expression.replace(is_lower_bound, bounded)


def describe(signed: Hashable) -> str:
    """A signature in words, for errors."""
    if isinstance(signed, TensorSignature):
        text = (
            f"shape {_sizes(signed.shape)}, stride "
            f"{'none' if signed.stride is None else _sizes(signed.stride)}, "
            f"dtype {signed.dtype}, device {signed.device}"
        )
        if signed.storage_offset != 0:
            text += f", storage offset {_size(signed.storage_offset)}"
        if signed.layout is not torch.strided:
            text += f", layout {signed.layout}"
        return text + ", conjugated" * signed.is_conj + ", negated" * signed.is_neg
    if isinstance(signed, _Symbolic):
        return str(signed.expression)
    if isinstance(signed, _ScriptObject):
        return repr(signed)
    if isinstance(signed, tuple) and len(signed) == 2 and isinstance(signed[0], type):
        return f"{signed[0].__name__} {signed[1]}"
    if isinstance(signed, tuple):
        return "(" + "; ".join(map(describe, signed)) + ")"
    return repr(signed)


def _tensor_signature(tensor: torch.Tensor) -> TensorSignature:
    layout = layout_of(tensor)
    strided = layout is torch.strided
    return TensorSignature(
        _plain_sizes(tensor.shape),
        _plain_sizes(tensor.stride()) if strided else None,
        _plain_size(tensor.storage_offset()) if strided else 0,
        tensor.dtype,
        device_of(tensor),
        layout,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _plain_sizes(sizes: tuple[int | torch.SymInt, ...]) -> tuple[Hashable, ...]:
    if set(map(type, sizes)) <= _ONLY_INTS:  # of most tensors, and quick to say
        return tuple(sizes)
    return tuple(map(_plain_size, sizes))


_ONLY_INTS = {int}


def _plain_size(size: int | torch.SymInt) -> Hashable:
    if type(size) is int:
        return size
    if isinstance(size, torch.SymInt):
        constant = size.node.maybe_as_int()
        return _Symbolic(size.node.expr) if constant is None else constant
    return int(size)


def _sizes(sizes: tuple[Hashable, ...]) -> str:
    return "[" + ", ".join(map(_size, sizes)) + "]"


def _size(size: Hashable) -> str:
    return str(size.expression) if isinstance(size, _Symbolic) else str(size)
