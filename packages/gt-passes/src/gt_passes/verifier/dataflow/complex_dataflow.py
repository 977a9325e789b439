"""Rules of operators that take complex numbers apart, and of views that change signs.

``_conj`` and ``_neg_view`` give views that PyTorch resolves when they are read. Two of the same
kind cancel out.
"""

from __future__ import annotations

from typing import Any

from gt_passes.verifier.dataflow.value_table import (
    Arguments,
    OtherValue,
    TensorValue,
    Value,
    ValueTable,
)


def conjugate(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``_conj``, ``conj_physical``: signs of imaginary parts change; real tensors stay as is."""
    source = arguments[0]
    if isinstance(source, TensorValue):
        dtype = table.dtype_of(source)
        if dtype is None or not dtype.is_complex:
            return source
    return _twice_is_nothing(table, "conjugate", source, recorded)


def negative_view(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``_neg_view``: all signs change."""
    return _twice_is_nothing(table, "negative view", arguments[0], recorded)


def _twice_is_nothing(table: ValueTable, tag: str, source: Value, recorded: Any) -> Value | None:
    if isinstance(source, OtherValue):
        return table.symbolic_view(source, recorded)
    if not isinstance(source, TensorValue):
        return None

    def changed(atom: int) -> int:
        definition = table.definitions[atom]
        if definition[0] == tag:
            assert isinstance(definition[1], int)
            return definition[1]
        return table.atom((tag, atom), numel=table.numel_of(atom), dtype=table.dtype_of_atom(atom))

    return table.tensor(source.shape, table.map_atoms(source.contents, changed))


def as_real(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``view_as_real``: a new last dim of real and imaginary parts."""
    source = arguments[0]
    if not isinstance(source, TensorValue) or not source.contents:
        return None
    atom, offset, strides = table.strided(source)
    definition = table.definitions[atom]
    if definition[0] == "as complex":
        assert isinstance(definition[1], int)
        parts = definition[1]
    else:
        parts = table.atom(("as real", atom), numel=2 * table.numel_of(atom), dtype=recorded.dtype)
    doubled = tuple(2 * stride for stride in strides)
    return table.from_strides(parts, 2 * offset, (*source.shape, 2), (*doubled, 1))


def as_complex(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``view_as_complex``: the last dim has real and imaginary parts."""
    source = arguments[0]
    if not isinstance(source, TensorValue) or not source.contents:
        return None
    atom, offset, strides = table.strided(source)
    if strides[-1] != 1 or table.numel_of(atom) % 2 or any(n % 2 for n in (offset, *strides[:-1])):
        return None
    definition = table.definitions[atom]
    if definition[0] == "as real":
        assert isinstance(definition[1], int)
        whole = definition[1]
    else:
        whole = table.atom(
            ("as complex", atom), numel=table.numel_of(atom) // 2, dtype=recorded.dtype
        )
    halved = tuple(stride // 2 for stride in strides[:-1])
    return table.from_strides(whole, offset // 2, source.shape[:-1], halved)
