"""The contents of written memory while a graph is walked in execution order.

Memory that nothing writes to needs none of this: its value is what made it. For the few alias
classes that are written to, each allocation has a separate number, views are pieces of it, and a
write replaces the pieces it covers. What a reader finds is a value like any other, so that a pass
may replace a buffer that is filled slice by slice with one ``cat``. A write through a view that has
no rule makes all of the memory that the view may lie in new and unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import Node

from gt_passes._torch_internals import value_of
from gt_passes.verifier.dataflow.flat_contents import (
    Column,
    Contents,
    Piece,
    Rows,
    atoms_of,
    columns_between,
    columns_of,
    concatenate,
    num_elements,
    rows_of,
    slice_contents,
    whole,
)
from gt_passes.verifier.dataflow.value_table import (
    OtherValue,
    TensorValue,
    TupleValue,
    Value,
    ValueTable,
)


class _PerhapsShared(NamedTuple):
    """A result of which it is unknown whether it shares the memory of its arguments."""

    made_as: Value
    """Its value as long as none of its possible memory is written to."""

    held: tuple[Value, ...]
    """The contents of each possible memory when it was made."""


@dataclass(slots=True)
class MemoryContents:
    """The written memory of one graph, as it is at one point of its execution.

    Args:
        table: knows all values.
        class_of: the alias class of every node that may share written memory.
        view_of: what a node makes of its arguments, given how to load them.
        load_other: the value of a node that is not in ``class_of``.
    """

    table: ValueTable
    class_of: Mapping[Node, int]
    view_of: Callable[[Node, Callable[[Node], Value]], Value]
    load_other: Callable[[Node], Value]

    _paths: dict[Node, Value | None] = field(default_factory=dict)
    """Every node's value so far, over numbers of memory; None where it cannot be followed."""

    _memories: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    """The numbers of memory in which each node without a path may lie, in a fixed order."""

    _perhaps_shared: dict[Node, _PerhapsShared] = field(default_factory=dict)

    _renamed: dict[Node, Node] = field(default_factory=dict)
    """The node that a writer returns, by the writer."""

    _held: dict[int, Value] = field(default_factory=dict)
    """The present contents of each number of memory, flat."""

    def allocate(self, node: Node, value: Value) -> None:
        """Note that a node made new memory, which now holds ``value``."""
        self._paths[node] = self._allocated(value)

    def share(self, node: Node, sources: Sequence[Node]) -> None:
        """Note that a node is a view of others, all in the same memory."""
        members = [source for source in sources if source in self.class_of]
        if all(self._paths[self._origin(source)] is not None for source in members):
            path = self.view_of(node, self._path)
            if self._is_exact(path):
                self._paths[node] = path
                return
        self._paths[node] = None
        self._memories[node] = self._memories_of(members)

    def share_perhaps(self, node: Node, sources: Sequence[Node], value: Value) -> None:
        """Note that a node holds ``value``, in new memory or in that of some of the sources."""
        own = self._numbers_in(self._allocated(value))
        memories = tuple(dict.fromkeys((*own, *self._memories_of(sources))))
        self._paths[node] = None
        self._memories[node] = memories
        held = tuple(self._held[memory] for memory in memories)
        self._perhaps_shared[node] = _PerhapsShared(value, held)

    def rename(self, node: Node, source: Node) -> None:
        """Note that a node is the same tensor as another one."""
        self._renamed[node] = self._origin(source)

    def read(self, node: Node) -> Value:
        """Return the present value of a node."""
        node = self._origin(node)
        if node not in self.class_of:
            return self.load_other(node)
        path = self._paths[node]
        if path is not None:
            return self._loaded(path)
        shared = self._perhaps_shared.get(node)
        if shared is None:
            return self.view_of(node, self.read)
        held = tuple(self._held[memory] for memory in self._memories[node])
        if held == shared.held:
            return shared.made_as
        numbers = (value.number for value in (shared.made_as, *held))
        return self.table.result(("perhaps written", *numbers), value_of(node))

    def write(self, node: Node, value: Value) -> None:
        """The elements of a tensor become those of ``value``, which has its shape."""
        path = self._paths[self._origin(node)]
        if isinstance(path, OtherValue):
            self._held[path.number] = value
            return
        if not isinstance(path, TensorValue) or not isinstance(value, TensorValue):
            self.clobber(node, value.number)
            return
        if not path.contents:
            return
        piece = path.contents[0]
        if len(path.contents) > 1 or not isinstance(piece, Piece):
            self.clobber(node, value.number)
            return
        held = self._held[piece.atom]
        assert isinstance(held, TensorValue)  # as its path is one
        self._held[piece.atom] = self._replaced(held, piece, value)

    def clobber(self, node: Node, effect: int) -> None:
        """Make the memory in which a node may lie unknown, after an effect."""
        # Which part of it the node is, only its value says.
        viewed = self.read(node).number
        for index, memory in enumerate(self._memories_of([node])):
            held = self._held[memory]
            definition = ("clobbered", held.number, viewed, effect, (int, index))
            if isinstance(held, TensorValue):
                numel = num_elements(held.contents)
                dtype = self.table.dtype_of(held) or torch.float32
                atom = self.table.atom(definition, numel=numel, dtype=dtype)
                self._held[memory] = self.table.tensor(held.shape, whole(atom, numel))
            else:
                self._held[memory] = OtherValue(self.table.number(definition))

    def _origin(self, node: Node) -> Node:
        return self._renamed.get(node, node)

    def _memories_of(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        """The numbers of memory in which nodes may lie, each once."""
        found: dict[int, None] = {}
        for node in map(self._origin, nodes):
            path = self._paths[node]
            memories = self._memories[node] if path is None else self._numbers_in(path)
            found |= dict.fromkeys(memories)
        return tuple(found)

    def _numbers_in(self, path: Value) -> Iterator[int]:
        """The numbers of memory of which a path consists."""
        if isinstance(path, TupleValue):
            for item in path.items:
                yield from self._numbers_in(item)
        elif isinstance(path, OtherValue):
            yield path.number
        else:
            yield from atoms_of(path.contents)

    def _allocated(self, value: Value) -> Value:
        if isinstance(value, TupleValue):
            return self.table.tuple_of(tuple(map(self._allocated, value.items)))
        table = self.table
        if isinstance(value, TensorValue):
            numel = num_elements(value.contents)
            memory = table.memory(numel=numel, dtype=table.dtype_of(value) or torch.float32)
            self._held[memory] = table.tensor((numel,), value.contents)
            path: Value = table.tensor(value.shape, whole(memory, numel))
        else:
            memory = table.memory(numel=0, dtype=torch.float32)
            self._held[memory] = value
            path = OtherValue(memory)
        return path

    def _path(self, node: Node) -> Value:
        node = self._origin(node)
        if node not in self.class_of:
            return self.load_other(node)
        path = self._paths[node]
        assert path is not None  # as share has seen
        return path

    def _is_exact(self, path: Value) -> bool:
        if isinstance(path, TupleValue):
            return all(map(self._is_exact, path.items))
        if isinstance(path, OtherValue):
            return path.number in self._held
        return all(atom in self._held for atom in atoms_of(path.contents))

    def _loaded(self, path: Value) -> Value:
        """The value that a path leads to now."""
        if isinstance(path, TupleValue):
            return self.table.tuple_of(tuple(map(self._loaded, path.items)))
        if isinstance(path, OtherValue):
            return self._held[path.number]
        return self.table.tensor(
            path.shape, concatenate(self._loaded_item(item) for item in path.contents)
        )

    def _loaded_item(self, item: Piece | Rows) -> Contents:
        if isinstance(item, Piece):
            return self._loaded_piece(item)
        columns = []
        for first, row_stride in item.columns:
            atom = self._held_atom(first.atom)
            columns.append(Column(Piece(atom, first.offset, first.dims), row_stride))
        return rows_of(item.num_rows, columns)

    def _loaded_piece(self, piece: Piece) -> Contents:
        held = self._held[piece.atom]
        assert isinstance(held, TensorValue)  # as its path is one
        if piece.dims in ((), ((num_elements((piece,)), 1),)):
            return slice_contents(
                held.contents, piece.offset, piece.offset + num_elements((piece,))
            )
        return _strided_part(held.contents, piece) or (
            Piece(self._held_atom(piece.atom), piece.offset, piece.dims),
        )

    def _held_atom(self, memory: int) -> int:
        held = self._held[memory]
        assert isinstance(held, TensorValue)
        return self.table.joined_atom(held.contents)

    def _replaced(self, held: TensorValue, piece: Piece, value: TensorValue) -> TensorValue:
        """Return the contents of memory after part of it was written."""
        numel, length = num_elements(held.contents), num_elements((piece,))
        if piece.dims in ((), ((length, 1),)):
            contents = concatenate(
                (
                    slice_contents(held.contents, 0, piece.offset),
                    value.contents,
                    slice_contents(held.contents, piece.offset + length, numel),
                )
            )
            return self.table.tensor(held.shape, contents)
        written = self._written_rows(held.contents, piece, value)
        if written is not None:
            return self.table.tensor(held.shape, written)
        dtype = self.table.dtype_of(held) or torch.float32
        definition = ("written", held.number, f"{piece.offset} {piece.dims}", value.number)
        atom = self.table.atom(definition, numel=numel, dtype=dtype)
        return self.table.tensor(held.shape, whole(atom, numel))

    def _written_rows(
        self, contents: Contents, piece: Piece, value: TensorValue
    ) -> Contents | None:
        """The contents after one stretch of several rows was written; None for others."""
        stretch = _stretch_of_rows(contents, piece)
        if stretch is None:
            return None
        first, last = stretch.row * stretch.distance, stretch.end_row * stretch.distance
        count = stretch.end_row - stretch.row
        old = columns_of(slice_contents(contents, first, last), count)
        if old is None:
            return None
        columns = (
            *columns_between(old, 0, stretch.start),
            *self.table.columns(value.contents, count),
            *columns_between(old, stretch.stop, stretch.distance),
        )
        return concatenate(
            (
                slice_contents(contents, 0, first),
                rows_of(count, columns),
                slice_contents(contents, last, num_elements(contents)),
            )
        )


class _StretchOfRows(NamedTuple):
    """The elements from one index to before another of each of several rows."""

    distance: int
    """Number of elements in a row."""

    row: int
    end_row: int
    start: int
    stop: int


def _stretch_of_rows(contents: Contents, part: Piece) -> _StretchOfRows | None:
    if len(part.dims) > 2 or (len(part.dims) == 2 and part.dims[1][1] != 1):
        return None
    (count, distance), length = part.dims[0], part.dims[1][0] if len(part.dims) == 2 else 1
    if distance <= 0 or num_elements(contents) % distance:
        return None
    row, start = divmod(part.offset, distance)
    if start + length > distance:
        return None
    return _StretchOfRows(distance, row, row + count, start, start + length)


def _strided_part(contents: Contents, part: Piece) -> Contents | None:
    """The same stretch of several rows of contents; None where ``part`` is something else."""
    stretch = _stretch_of_rows(contents, part)
    if stretch is None:
        return None
    columns = columns_of(contents, num_elements(contents) // stretch.distance)
    if columns is None:
        return None
    return rows_of(
        stretch.end_row - stretch.row,
        (
            Column(first._replace(offset=first.offset + stretch.row * row_stride), row_stride)
            for first, row_stride in columns_between(columns, stretch.start, stretch.stop)
        ),
    )
