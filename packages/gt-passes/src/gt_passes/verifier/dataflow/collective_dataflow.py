"""Rules of collectives: what a rank holds afterwards, by what all ranks held before.

What one collective is given is a *unit*. Its result is known by the unit as a whole: other ranks
may have cut or padded what they give in another place, so that nothing is said of single elements.
A bucket consists of units, and its result of theirs, whichever way it was cut up again. That a
bucket holds the same units in the same order on every rank, no single graph shows: ranks compare
the numbers that ``ValueTable.exchanges_of`` gives (``gt_passes.verifier.collective_order``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gt_passes.verifier.dataflow.flat_contents import (
    Column,
    Contents,
    Piece,
    atoms_of,
    columns_between,
    concatenate,
    num_elements,
    rows_of,
    slice_contents,
    whole,
)
from gt_passes.verifier.dataflow.value_table import (
    Arguments,
    Definition,
    Rule,
    TensorValue,
    Value,
    ValueTable,
)


def all_reduce(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Every element is reduced over all ranks."""
    source, reduction, group = arguments[:3]
    if isinstance(source, (list, tuple)):
        return _each(table, all_reduce, arguments, recorded)
    if not isinstance(source, TensorValue):
        return None
    kind = ("all_reduce", reduction, group)
    dtype = _dtype(table, source, recorded)
    reduced = []
    for unit, length in _units_of(table, kind, *_as_one_row(source.contents)):
        atom = table.atom((*kind, unit), numel=length, dtype=dtype)
        reduced.append(whole(atom, length))
    return table.tensor(source.shape, concatenate(reduced))


def all_gather(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """Row r of the result is what rank r gave: row r of every unit."""
    source, num_ranks, group = arguments[:3]
    if isinstance(source, (list, tuple)):
        return _each(table, all_gather, arguments, recorded)
    if not isinstance(source, TensorValue) or not source.shape or type(num_ranks) is not int:
        return None
    kind = ("all_gather", (int, num_ranks), group)
    dtype = _dtype(table, source, recorded)
    contents, own_dtype = table.without_bits(source.contents)
    columns = []
    for unit, length in _units_of(table, kind, *_as_one_row(contents)):
        atom = table.atom((*kind, unit), numel=num_ranks * length, dtype=own_dtype or dtype)
        if own_dtype is not None:
            atom = table.bits(atom, dtype)
        columns.append(Column(Piece(atom, 0, ((length, 1),) if length > 1 else ()), length))
    shape = (num_ranks * source.shape[0], *source.shape[1:])
    return table.tensor(shape, rows_of(num_ranks, columns))


def as_gathered(table: ValueTable, like: Definition, contents: Contents) -> int:
    """The atom of what ranks gather, each such contents, as something else was gathered.

    Args:
        table: remembers what is gathered as a unit.
        like: the definition of what ``all_gather`` made of something else.
        contents: what this rank gives.
    """
    kind, num_ranks = like[:-1], like[1]
    assert isinstance(num_ranks, tuple)  # a constant: its type and itself
    ((unit, length),) = _units_of(table, kind, *_as_one_row(contents), as_one=True)
    dtype = next(map(table.dtype_of_atom, atoms_of(contents)))
    return table.atom((*kind, unit), numel=num_ranks[1] * length, dtype=dtype)


def reduce_scatter(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """The result is a reduced row, that of every unit."""
    source, reduction, num_ranks, group = arguments[:4]
    if isinstance(source, (list, tuple)):
        return _each(table, reduce_scatter, arguments, recorded)
    if not isinstance(source, TensorValue) or not source.contents or type(num_ranks) is not int:
        return None
    if source.shape[0] % num_ranks:
        return None
    rows = table.columns(source.contents, num_ranks)

    def part(start: int, stop: int) -> Contents:
        return rows_of(num_ranks, columns_between(rows, start, stop))

    kind = ("reduce_scatter", reduction, (int, num_ranks), group)
    dtype = _dtype(table, source, recorded)
    pieces = []
    for unit, length in _units_of(table, kind, part, num_elements(source.contents) // num_ranks):
        # Which row it is that this rank gets is the same for all of them.
        pieces.append(whole(table.atom((*kind, unit), numel=length, dtype=dtype), length))
    shape = (source.shape[0] // num_ranks, *source.shape[1:])
    return table.tensor(shape, concatenate(pieces))


class _Unit(NamedTuple):
    """What one collective was given, all of it."""

    number: int
    row_length: int


_Part = Callable[[int, int], Contents]
"""The elements of every row from one index to before another."""


def _as_one_row(contents: Contents) -> tuple[_Part, int]:
    def part(start: int, stop: int) -> Contents:
        return slice_contents(contents, start, stop)

    return part, num_elements(contents)


def _units_of(
    table: ValueTable, kind: Definition, part: _Part, row_length: int, *, as_one: bool = False
) -> list[_Unit]:
    """What a collective is given, as what others of its kind were given; else as a new unit.

    Args:
        table: remembers units.
        kind: operator, reduction and group.
        part: of what is given.
        row_length: number of elements in each row.
        as_one: whether all of it is one unit, whatever of it was given to others.
    """
    known = table.units.setdefault(kind, {})
    found: list[_Unit] = []
    position = 0
    while position < row_length:
        first_atom = next(atoms_of(part(position, position + 1)))
        unit = max(
            (
                _Unit(number, length)
                for number, length, contents in known.get(first_atom, ())
                if length <= row_length - position
                and (length == row_length or not as_one)
                and part(position, position + length) == contents
            ),
            key=lambda unit: unit.row_length,
            default=None,
        )
        if unit is None:
            everything = part(0, row_length)
            unit = _Unit(table.joined_atom(everything), row_length)
            first_atom = next(atoms_of(everything))
            known.setdefault(first_atom, []).append((*unit, everything))
            return [unit]
        found.append(unit)
        position += unit.row_length
    return found


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
