"""What written memory holds while a graph is walked in execution order.

Memory that nothing writes to needs none of this: its value is what made it. For the few alias
classes that are written to, each allocation has a number of its own, views are pieces of it, and a
write replaces the pieces it covers. What a reader finds is a value like any other, so that a pass
may replace a buffer that is filled slice by slice with one ``cat``. A write that cannot be followed
exactly makes everything in its class new and unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

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


@dataclass(slots=True)
class MemoryContents:
    """The written memory of one graph, as it is at one point of its execution.

    Args:
        table: knows all values.
        class_of: the alias class of every node that may share written memory.
        view_of: what a node makes of its arguments, given how to load them.
    """

    table: ValueTable
    class_of: Mapping[Node, int]
    view_of: Callable[[Node, Callable[[Node], Value]], Value]

    _paths: dict[Node, Value | None] = field(default_factory=dict)
    """Every node's value so far, over numbers of memory; None where it cannot be followed."""

    _held: dict[int, Value] = field(default_factory=dict)
    """What each number of memory holds now, flat."""

    _memories: dict[int, list[int]] = field(default_factory=dict)
    """The numbers of memory of each alias class."""

    def allocate(self, node: Node, value: Value) -> None:
        """A node made memory of its own, which now holds ``value``."""
        self._paths[node] = self._allocated(self.class_of[node], value)

    def share(self, node: Node, sources: Sequence[Node]) -> None:
        """A node is a view of what others are, all in the same memory."""
        if any(self._paths.get(source) is None for source in sources if source in self.class_of):
            self._paths[node] = None
            return
        path = self.view_of(node, self._path)
        self._paths[node] = path if self._is_exact(path) else None

    def rename(self, node: Node, source: Node) -> None:
        """A node is the very tensor that another one is."""
        self._paths[node] = self._paths.get(source)

    def read(self, node: Node) -> Value:
        """What a node of a written class holds now."""
        path = self._paths[node]
        return self.view_of(node, self.read) if path is None else self._loaded(path)

    def write(self, node: Node, value: Value) -> None:
        """The elements of a tensor become those of ``value``, which has its shape."""
        path = self._paths[node]
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
        """Anything may have happened to memory that a node shares."""
        for memory in self._memories.get(self.class_of[node], ()):
            held = self._held[memory]
            definition = ("clobbered", held.number, effect)
            if isinstance(held, TensorValue):
                numel = num_elements(held.contents)
                dtype = self.table.dtype_of(held) or torch.float32
                atom = self.table.atom(definition, numel=numel, dtype=dtype)
                self._held[memory] = self.table.tensor(held.shape, whole(atom, numel))
            else:
                self._held[memory] = OtherValue(self.table.number(definition))

    def _allocated(self, alias_class: int, value: Value) -> Value:
        if isinstance(value, TupleValue):
            return self.table.tuple_of(
                tuple(self._allocated(alias_class, item) for item in value.items)
            )
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
        self._memories.setdefault(alias_class, []).append(memory)
        return path

    def _path(self, node: Node) -> Value:
        path = self._paths.get(node)
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
        """What memory holds after part of it was written."""
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
        dtype = self.table.dtype_of(held) or torch.float32
        definition = ("written", held.number, f"{piece.offset} {piece.dims}", value.number)
        atom = self.table.atom(definition, numel=numel, dtype=dtype)
        return self.table.tensor(held.shape, whole(atom, numel))


def _strided_part(contents: Contents, part: Piece) -> Contents | None:
    """The same stretch of several rows of contents; None where ``part`` is something else."""
    if len(part.dims) > 2 or (len(part.dims) == 2 and part.dims[1][1] != 1):
        return None
    (count, distance), length = part.dims[0], part.dims[1][0] if len(part.dims) == 2 else 1
    numel = num_elements(contents)
    if distance <= 0 or numel % distance:
        return None
    row, start = divmod(part.offset, distance)
    columns = columns_of(contents, numel // distance)
    if columns is None or start + length > distance:
        return None
    return rows_of(
        count,
        (
            Column(first._replace(offset=first.offset + row * row_stride), row_stride)
            for first, row_stride in columns_between(columns, start, start + length)
        ),
    )
