"""Contents of tensors as sequences of strided pieces of other values, in row-major order.

Views, buckets and the rows that an all-gather makes of every rank move elements and compute
nothing. Described as pieces of the values that operators computed, equal contents look equal,
whichever way they were moved: a slice of a bucket of two parameters is one of the parameters. The
description of a piece is that of a strided tensor; what is joined and split here is ordinary
integer arithmetic, independent of the number of elements and, for buckets, of the number of ranks.

``(atom, offset, dims)`` stands for the elements ``atom[offset + i0*stride0 + i1*stride1 + ...]`` of
the flat contents of an atom, which is a number that names a value; the last index runs fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Dims = tuple[tuple[int, int], ...]
"""``(size, stride)`` of each dim, outermost first; no size is 1, and none could be merged."""


class Piece(NamedTuple):
    """A strided part of one atom."""

    atom: int
    offset: int
    dims: Dims


class Column(NamedTuple):
    """The same part of every row."""

    first: Piece
    """What row 0 has."""

    row_stride: int
    """How much the offset grows from one row to the next."""


class Rows(NamedTuple):
    """Rows, each the concatenation of one piece of every column. At least two of both."""

    num_rows: int
    columns: tuple[Column, ...]


Contents = tuple[Piece | Rows, ...]
"""All elements of a tensor, in row-major order; empty if it has none."""


def whole(atom: int, numel: int) -> Contents:
    """All of an atom."""
    if numel == 0:
        return ()
    return (Piece(atom, 0, ((numel, 1),) if numel > 1 else ()),)


def num_elements(contents: Iterable[Piece | Rows]) -> int:
    """Number of elements."""
    return sum(map(_length, contents))


def merged_dims(dims: Iterable[tuple[int, int]]) -> Dims:
    """The shortest description of the same sequence of elements."""
    kept: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(kept)


def strides_for_shape(shape: Sequence[int], dims: Dims) -> tuple[int, ...] | None:
    """The strides with which a tensor of that shape walks ``dims``; None where it cannot."""
    strides = [0] * len(shape)
    level = len(dims)
    left, stride = 1, 0
    for dim in range(len(shape) - 1, -1, -1):
        size = shape[dim]
        if size == 1:
            continue
        if left == 1:
            level -= 1
            if level < 0:
                return None
            left, stride = dims[level]
        if left % size:
            return None
        strides[dim] = stride
        left //= size
        stride *= size
    return tuple(strides) if left == 1 and level <= 0 else None


def concatenate(parts: Iterable[Contents]) -> Contents:
    """The contents of the parts, one after the other, in normal form."""
    joined: list[Piece | Rows] = []
    for part in parts:
        for item in part:
            longer = _joined(joined[-1], item) if joined else None
            if longer is None:
                joined.append(item)
            else:
                joined[-1] = longer
    pieces = [item for item in joined if isinstance(item, Piece)]
    if len(pieces) == len(joined):
        regular = _progression([(piece, 0) for piece in pieces])
        if regular is not None:
            return (regular[0],)
    return tuple(joined)


def slice_contents(contents: Contents, start: int, stop: int) -> Contents:
    """The elements from ``start`` to before ``stop``."""
    taken: list[Contents] = []
    position = 0
    for item in contents:
        length = _length(item)
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            if (low, high) == (0, length):
                taken.append((item,))
            elif isinstance(item, Piece):
                taken.append(tuple(_slice_piece(item, low, high)))
            else:
                taken.extend(_slice_rows(item, low, high))
        position += length
    return taken[0] if len(taken) == 1 else concatenate(taken)


def columns_of(contents: Contents, num_rows: int) -> tuple[Column, ...] | None:
    """The contents as that many equal rows; None where no short description says so."""
    if num_rows == 1:
        if not all(isinstance(item, Piece) for item in contents):
            return None
        return tuple(Column(item, 0) for item in contents if isinstance(item, Piece))
    if len(contents) != 1:
        return None
    (item,) = contents
    if isinstance(item, Rows):
        return item.columns if item.num_rows == num_rows else None
    if not item.dims:
        return None
    (size, stride), inner = item.dims[0], item.dims[1:]
    if size % num_rows:
        return None
    length = size // num_rows
    dims = inner if length == 1 else ((length, stride), *inner)
    return (Column(Piece(item.atom, item.offset, dims), stride * length),)


def columns_between(columns: Sequence[Column], start: int, stop: int) -> list[Column]:
    """The part of every row from ``start`` to before ``stop``."""
    found = []
    position = 0
    for first, row_stride in columns:
        length = _length(first)
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            found += [Column(piece, row_stride) for piece in _slice_piece(first, low, high)]
        position += length
    return found


def rows_of(num_rows: int, columns: Iterable[Column]) -> Contents:
    """Rows with these columns, in normal form."""
    kept: list[Column] = []
    for column in columns:
        if kept and kept[-1].row_stride == column.row_stride:
            longer = _joined(kept[-1].first, column.first)
            if longer is not None:
                assert isinstance(longer, Piece)  # as both of what was joined
                kept[-1] = Column(longer, column.row_stride)
                continue
        kept.append(column)
    if num_rows == 1:
        return concatenate((column.first,) for column in kept)
    if len(kept) > 1:
        regular = _progression([(column.first, column.row_stride) for column in kept])
        if regular is not None:
            kept = [Column(*regular)]
    if len(kept) == 1:
        (atom, offset, dims), row_stride = kept[0]
        return (Piece(atom, offset, merged_dims(((num_rows, row_stride), *dims))),)
    return (Rows(num_rows, tuple(kept)),) if kept else ()


def atoms_of(contents: Contents) -> Iterator[int]:
    """The atom of every piece, in order."""
    for item in contents:
        if isinstance(item, Piece):
            yield item.atom
        else:
            for column in item.columns:
                yield column.first.atom


def _length(item: Piece | Rows) -> int:
    if isinstance(item, Piece):
        if len(item.dims) == 1:  # as of most pieces
            return item.dims[0][0]
        return math.prod(size for size, _ in item.dims)
    return item.num_rows * sum(_length(column.first) for column in item.columns)


def _joined(first: Piece | Rows, second: Piece | Rows) -> Piece | None:
    """One piece for two that follow each other in memory; None where there is none."""
    if isinstance(first, Rows) or isinstance(second, Rows) or first.atom != second.atom:
        return None
    for leading in (first, second):
        # The outermost dim grows; it is not there in a piece with one step of it.
        if leading.dims:
            stride, inner = leading.dims[0][1], leading.dims[1:]
            first_size = _steps(first.dims, stride, inner)
            second_size = _steps(second.dims, stride, inner)
            if first_size and second_size:
                if second.offset != first.offset + first_size * stride:
                    continue
                dims = merged_dims(((first_size + second_size, stride), *inner))
                return Piece(first.atom, first.offset, dims)
    if not first.dims and not second.dims and second.offset == first.offset + 1:
        return Piece(first.atom, first.offset, ((2, 1),))
    return None


def _steps(dims: Dims, stride: int, inner: Dims) -> int:
    """How many steps of ``stride`` over ``inner`` the dims are; 0 if they are something else."""
    if dims == inner:
        return 1
    if dims[1:] == inner and dims and dims[0][1] == stride:
        return dims[0][0]
    return 0


def _progression(pieces: list[tuple[Piece, int]]) -> tuple[Piece, int] | None:
    """One piece for several with a row stride each that lie at equal distances."""
    if len(pieces) < 2:
        return None
    (first, row_stride), (second, _) = pieces[0], pieces[1]
    distance = second.offset - first.offset
    if distance == 0:
        # The same part several times, as in a bucket that gathers one parameter twice: cutting it
        # up again finds the parts as they were only while they stand side by side.
        return None
    for index, (piece, stride) in enumerate(pieces):
        expected = (first.atom, first.offset + index * distance, first.dims)
        if stride != row_stride or piece != expected:
            return None
    dims = merged_dims(((len(pieces), distance), *first.dims))
    return Piece(first.atom, first.offset, dims), row_stride


def _slice_piece(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """The pieces of part of a piece: whole steps of the outermost dim, and parts of the ends."""
    if (start, stop) == (0, _length(piece)):
        yield piece
        return
    (_, stride), inner = piece.dims[0], piece.dims[1:]
    length = math.prod(size for size, _ in inner)

    def step(index: int) -> Piece:
        return Piece(piece.atom, piece.offset + index * stride, inner)

    first, last = start // length, (stop - 1) // length
    if first == last:
        yield from _slice_piece(step(first), start - first * length, stop - first * length)
        return
    if start % length:
        yield from _slice_piece(step(first), start % length, length)
        first += 1
    num_whole = stop // length - first
    if num_whole:
        yield step(first)._replace(dims=merged_dims(((num_whole, stride), *inner)))
    if stop % length:
        yield from _slice_piece(step(stop // length), 0, stop % length)


def _slice_rows(rows: Rows, start: int, stop: int) -> Iterator[Contents]:
    length = _length(rows) // rows.num_rows

    def row(index: int) -> Contents:
        return tuple(
            first._replace(offset=first.offset + index * row_stride)
            for first, row_stride in rows.columns
        )

    first, last = start // length, (stop - 1) // length
    if first == last:
        yield slice_contents(row(first), start - first * length, stop - first * length)
        return
    if start % length:
        yield slice_contents(row(first), start % length, length)
        first += 1
    num_whole = stop // length - first
    if num_whole:
        yield rows_of(
            num_whole,
            (
                Column(piece._replace(offset=piece.offset + first * row_stride), row_stride)
                for piece, row_stride in rows.columns
            ),
        )
    if stop % length:
        yield slice_contents(row(stop // length), 0, stop % length)
