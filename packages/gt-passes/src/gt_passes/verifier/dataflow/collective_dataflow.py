"""Rules of collectives: what a rank holds afterwards, by what all ranks held before.

All ranks run the same graph, so that what rank r holds where this rank holds a value is that value
*of rank r*. Rows and buckets of such values are told apart exactly, whichever way a bucket was put
together and cut up again.
"""

from __future__ import annotations

from typing import Any

import torch

from gt_passes.verifier.dataflow.flat_contents import (
    Column,
    Contents,
    Piece,
    concatenate,
    num_elements,
    rows_of,
)
from gt_passes.verifier.dataflow.value_table import Arguments, Rule, TensorValue, Value, ValueTable


def all_reduce(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Every element is reduced over all ranks."""
    source, reduction, group = arguments[:3]
    if isinstance(source, (list, tuple)):
        return _each(table, all_reduce, arguments, recorded)
    if not isinstance(source, TensorValue):
        return None

    def reduced(atom: int) -> int:
        definition = ("all_reduce", reduction, group, atom)
        return table.atom(
            definition, numel=table.numel_of(atom), dtype=_dtype(table, source, recorded)
        )

    return table.tensor(source.shape, table.map_atoms(source.contents, reduced))


def all_gather(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Row r of the result is what rank r gave: the same pieces of *its* values."""
    source, num_ranks, group = arguments[:3]
    if isinstance(source, (list, tuple)):
        return _each(table, all_gather, arguments, recorded)
    if not isinstance(source, TensorValue) or not source.shape or type(num_ranks) is not int:
        return None
    columns = []
    for item in source.contents:
        if isinstance(item, Piece):
            atom, offset, dims = item
        else:
            atom, offset = table.joined_atom((item,)), 0
            dims = ((num_elements((item,)), 1),)
        numel = table.numel_of(atom)
        gathered = table.atom(
            ("all_gather", (int, num_ranks), group, atom),
            numel=num_ranks * numel,
            dtype=_dtype(table, source, recorded),
        )
        columns.append(Column(Piece(gathered, offset, dims), numel))
    shape = (num_ranks * source.shape[0], *source.shape[1:])
    return table.tensor(shape, rows_of(num_ranks, columns))


def reduce_scatter(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """The result is a reduced row; its pieces are those of the rows of the argument."""
    source, reduction, num_ranks, group = arguments[:4]
    if isinstance(source, (list, tuple)):
        return _each(table, reduce_scatter, arguments, recorded)
    if not isinstance(source, TensorValue) or not source.contents or type(num_ranks) is not int:
        return None
    if source.shape[0] % num_ranks:
        return None
    pieces: list[Contents] = []
    for first, row_stride in table.columns(source.contents, num_ranks):
        numel = table.numel_of(first.atom)
        length = row_stride if num_ranks > 1 else numel
        ranks = ((int, num_ranks), group)
        row_of_rank = table.atom(
            ("reduce_scatter", reduction, *ranks, (int, length), first.atom),
            numel=length if length * num_ranks == numel else numel,
            dtype=_dtype(table, source, recorded),
        )
        # Which row it is that this rank gets is the same for all of them.
        pieces.append((first._replace(atom=row_of_rank),))
    shape = (source.shape[0] // num_ranks, *source.shape[1:])
    return table.tensor(shape, concatenate(pieces))


def _each(table: ValueTable, rule: Rule, arguments: Arguments, recorded: Any) -> Value | None:
    """A collective on a list is the collective on each of its tensors."""
    parts = [
        rule(table, (source, *arguments[1:]), part)
        for source, part in zip(arguments[0], recorded, strict=True)
    ]
    if any(part is None for part in parts):
        return None
    return table.tuple_of(tuple(part for part in parts if part is not None))


def _dtype(table: ValueTable, source: TensorValue, recorded: Any) -> torch.dtype:
    if isinstance(recorded, torch.Tensor):
        return recorded.dtype
    dtype = table.dtype_of(source)
    assert dtype is not None  # asked of tensors with elements
    return dtype
