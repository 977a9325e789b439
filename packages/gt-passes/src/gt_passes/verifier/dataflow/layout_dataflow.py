"""Rules of operators that only move elements: views, slices, permutations, joins.

Each is exact: it says which elements of which values the result consists of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from gt_passes.verifier.dataflow.flat_contents import (
    Piece,
    columns_between,
    concatenate,
    rows_of,
    slice_contents,
)
from gt_passes.verifier.dataflow.value_table import (
    Arguments,
    OtherValue,
    TensorValue,
    Value,
    ValueTable,
)


def view(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """The same elements in another shape, in place."""
    if not isinstance(arguments[0], TensorValue):
        return _symbolic_view(table, arguments, recorded)
    return reshape(table, arguments, recorded)


def reshape(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """The same elements in another shape, copied if they do not lie in order."""
    source = arguments[0]
    if not isinstance(source, TensorValue):
        return table.symbolic_reshape(source, recorded) if isinstance(source, OtherValue) else None
    shape = known_shape(recorded)
    if shape is None or math.prod(shape) != math.prod(source.shape):
        return None
    return table.tensor(shape, source.contents)


def _symbolic_view(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    source = arguments[0]
    return table.symbolic_view(source, recorded) if isinstance(source, OtherValue) else None


def _permuted(table: ValueTable, source: TensorValue, order: Sequence[int]) -> Value:
    if not source.contents:
        return table.tensor(tuple(source.shape[dim] for dim in order), ())
    atom, offset, strides = table.strided(source)
    return table.from_strides(
        atom,
        offset,
        tuple(source.shape[dim] for dim in order),
        tuple(strides[dim] for dim in order),
    )


def permute(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``permute``."""
    source, order = arguments[:2]
    if not isinstance(source, TensorValue):
        return _symbolic_view(table, arguments, recorded)
    return _permuted(table, source, [dim % len(source.shape) for dim in order])


def transpose(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``t`` and ``transpose``."""
    source = arguments[0]
    if not isinstance(source, TensorValue):
        return _symbolic_view(table, arguments, recorded)
    order = list(range(len(source.shape)))
    if len(order) > 1:
        # `t` swaps its two dims
        first, second = arguments[1:3] if len(arguments) > 1 else (0, 1)
        order[first], order[second] = order[second], order[first]
    return _permuted(table, source, order)


def expand(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Elements repeated along dims of size 1, and new ones."""
    source, shape = arguments[0], known_shape(recorded)
    if not isinstance(source, TensorValue):
        return _symbolic_view(table, arguments, recorded)
    if shape is None:
        return None
    return broadcast(table, source, shape)


def broadcast(table: ValueTable, source: TensorValue, shape: tuple[int, ...]) -> Value | None:
    """A tensor expanded to a shape; None where that cannot be."""
    if source.shape == shape:
        return source
    if not source.contents:
        return table.tensor(shape, ()) if 0 in shape else None
    atom, offset, strides = table.strided(source)
    new_dims = len(shape) - len(source.shape)
    if new_dims < 0:
        return None
    steps = [0] * new_dims
    for size, wanted, stride in zip(source.shape, shape[new_dims:], strides, strict=True):
        if size not in (wanted, 1):
            return None
        steps.append(stride if size == wanted else 0)
    return table.from_strides(atom, offset, shape, tuple(steps))


def _part(
    table: ValueTable, source: TensorValue, dim: int, start: int, stop: int, step: int = 1
) -> TensorValue:
    """``source[start:stop:step]`` along a dim, by indices that are in range."""
    shape = list(source.shape)
    shape[dim] = max(0, -(-(stop - start) // step))
    if 0 in shape:
        return table.tensor(tuple(shape), ())
    if step != 1:
        atom, offset, strides = table.strided(source)
        steps = list(strides)
        steps[dim] *= step
        start_offset = offset + start * strides[dim]
        return table.from_strides(atom, start_offset, tuple(shape), tuple(steps))
    num_rows = math.prod(source.shape[:dim])
    inner = math.prod(source.shape[dim + 1 :])
    if num_rows == 1:
        contents = slice_contents(source.contents, start * inner, stop * inner)
        return table.tensor(tuple(shape), contents)
    if len(source.contents) == 1 and isinstance(source.contents[0], Piece):
        atom, offset, strides = table.strided(source)
        start_offset = offset + start * strides[dim]
        return table.from_strides(atom, start_offset, tuple(shape), strides)
    columns = columns_between(table.columns(source.contents, num_rows), start * inner, stop * inner)
    return table.tensor(tuple(shape), rows_of(num_rows, columns))


def slice_dim(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``slice``: a range of a dim, perhaps with steps."""
    source, dim, start, stop, step = arguments
    if not isinstance(source, TensorValue):
        return _symbolic_view(table, arguments, recorded)
    if not all(isinstance(item, (int, type(None))) for item in (start, stop, step)):
        return None
    size = source.shape[dim]
    low, high, stride = slice(start, stop, step).indices(size)
    return _part(table, source, dim % len(source.shape), low, max(low, high), stride)


def narrow(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``narrow``."""
    source, dim, start, length = arguments
    if not isinstance(source, TensorValue):
        return _symbolic_view(table, arguments, recorded)
    if type(start) is not int or type(length) is not int:
        return None
    dim %= len(source.shape)
    if start < 0:
        start += source.shape[dim]
    return _part(table, source, dim, start, start + length)


def select(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """One index of a dim."""
    source, dim, index = arguments
    if not isinstance(source, TensorValue):
        return _symbolic_view(table, arguments, recorded)
    if type(index) is not int:
        return None
    dim %= len(source.shape)
    index %= source.shape[dim]
    part = _part(table, source, dim, index, index + 1)
    return table.tensor(source.shape[:dim] + source.shape[dim + 1 :], part.contents)


def split(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Every operator that cuts a tensor into parts along a dim, by the recorded parts."""
    source, dim = arguments[0], arguments[2]
    if not isinstance(source, TensorValue) or type(dim) is not int:
        return None
    shapes = [known_shape(part) for part in recorded]
    dim %= len(source.shape)
    parts: list[Value] = []
    position = 0
    for shape in shapes:
        if shape is None:
            return None
        parts.append(_part(table, source, dim, position, position + shape[dim]))
        position += shape[dim]
    return table.tuple_of(tuple(parts)) if position == source.shape[dim] else None


def unbind(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Every index of a dim."""
    source, dim = arguments
    if not isinstance(source, TensorValue):
        return None
    parts = [select(table, (source, dim, index), None) for index in range(source.shape[dim])]
    return table.tuple_of(tuple(part for part in parts if part is not None))


def cat(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Tensors joined along a dim."""
    sources, dim = arguments
    shape = known_shape(recorded)
    if shape is None or not all(isinstance(source, TensorValue) for source in sources):
        return None
    if len({table.dtype_of(source) for source in sources} - {None}) > 1:
        return None  # it casts
    num_rows = math.prod(shape[: dim % len(shape)])
    return table.tensor(shape, joined_rows(table, sources, num_rows).contents)


def joined_rows(table: ValueTable, sources: Sequence[TensorValue], num_rows: int) -> TensorValue:
    """One flat tensor of rows; each is a part of every source, one after another."""
    numel = sum(math.prod(source.shape) for source in sources)
    if num_rows == 1:
        return table.tensor((numel,), concatenate(source.contents for source in sources))
    columns = [
        column
        for source in sources
        if source.contents
        for column in table.columns(source.contents, num_rows)
    ]
    return table.tensor((numel,), rows_of(num_rows, columns))


def cut_rows(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``unpack_bucket``: of every row the same parts, flat."""
    bucket, num_rows, sizes = arguments
    if not isinstance(bucket, TensorValue) or num_rows * sum(sizes) != bucket.shape[0]:
        return None
    rows = table.tensor((num_rows, sum(sizes)), bucket.contents)
    ends = list(itertools.accumulate(sizes, initial=0))
    parts = [_part(table, rows, 1, start, stop) for start, stop in itertools.pairwise(ends)]
    flat = [table.tensor((math.prod(part.shape),), part.contents) for part in parts]
    return table.tuple_of(tuple(flat))


def stack(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Tensors joined along a new dim."""
    sources, dim = arguments
    shape = known_shape(recorded)
    if shape is None or not all(isinstance(source, TensorValue) for source in sources):
        return None
    dim %= len(shape)
    rows = [
        table.tensor((*source.shape[:dim], 1, *source.shape[dim:]), source.contents)
        for source in sources
    ]
    return cat(table, (rows, dim), recorded)


def known_shape(recorded: object) -> tuple[int, ...] | None:
    """The shape of a recorded tensor; None if a size is symbolic."""
    if not isinstance(recorded, torch.Tensor):
        return None
    shape = tuple(recorded.shape)
    return shape if set(map(type, shape)) <= {int} else None
