"""Global value numbering: equal computations have equal numbers, in all graphs of one table.

A *definition* says how a value comes about: an operator applied to numbered values, an input, a
piece of memory after a write. Equal definitions get one number, so that two graphs compute the same
value exactly where the numbers are equal, whatever their nodes are called and in which order they
stand. Numbering of this kind is what optimizers use to find equal expressions (Click, "Global Code
Motion, Global Value Numbering", PLDI 1995); here it compares a graph before and after a pass.

The value of a tensor is its shape and its contents (``flat_contents``) over *atoms*, the numbers of
what operators computed. Strides are no part of a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gt_passes.analysis.call_form import CallForm
from gt_passes.analysis.tensor_signature import TensorSignature, is_row_major, signature, symbols_of
from gt_passes.verifier.dataflow.flat_contents import (
    Column,
    Contents,
    Dims,
    Piece,
    Rows,
    atoms_of,
    columns_of,
    merged_dims,
    num_elements,
    strides_for_shape,
    whole,
)

Definition = tuple[Hashable, ...]
"""A tag and what it is about. A bare int inside is the number of a value; other integers stand in
pairs with their type, see ``frozen_literal``. In the definitions of tensors only atoms are numbers.
"""


@dataclass(slots=True, eq=False)  # not frozen: thousands are made, and freezing each is slow
class TensorValue:
    """A tensor whose sizes are all known."""

    number: int
    shape: tuple[int, ...]
    contents: Contents


@dataclass(frozen=True, slots=True, eq=False)
class TupleValue:
    """Several results of one operator."""

    number: int
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OtherValue:
    """A size, a number, a subgraph, or a tensor with symbolic sizes: known by its number only."""

    number: int


Value = TensorValue | TupleValue | OtherValue


_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
"""PyTorch names symbols ``s0`` or ``u0``."""


_ONLY_INTS = {int}


Arguments = Sequence[Any]
"""What a call is given for each argument of its schema: values, constants, lists of them."""


class _MadeOfOnePiece(NamedTuple):
    """What a call makes of one piece of an atom: a piece of it, or of what is made of it."""

    shape: tuple[int, ...]
    offset: int
    dims: Dims

    definition: tuple[Definition, Definition, int, torch.dtype] | None
    """What stands before and after the atom in the definition of the new one, and that one's number
    of elements and dtype; None where it is the same atom."""


class _SymbolicTensor(NamedTuple):
    """A tensor with symbolic sizes: a view of what some operator computed."""

    base: int
    base_layout: Hashable
    layout: Hashable
    is_row_major: bool


@dataclass(slots=True)
class ValueTable:
    """The numbers of all values seen so far. Grows only; use one for one run of passes."""

    definitions: list[Definition] = field(default_factory=list)
    """The definition of each number. A call is its form, and then the numbers of its operands."""

    results: dict[Hashable, Value] = field(default_factory=dict)
    """What a call of an operator on numbered values gave, so that it is worked out once."""

    rules: dict[CallForm, tuple[Rule | None, list[Any]]] = field(default_factory=dict)
    """What is known of each form of call: see ``operator_dataflow.apply_rule``."""

    spellings: dict[tuple[CallForm, tuple[int | None, ...]], tuple[CallForm, tuple[int, ...]]] = (
        field(default_factory=dict)
    )
    """The one spelling of each form of call, by the ranks of its operands."""

    units: dict[Definition, dict[int, list[tuple[int, int, Contents]]]] = field(
        default_factory=dict
    )
    """What collectives were given, by kind and first atom: number, length of a row, contents."""

    _made: dict[Hashable, _MadeOfOnePiece] = field(default_factory=dict)
    """What forms of calls make of one piece of any atom."""

    _exchanges: dict[int, str] = field(default_factory=dict)

    _numbers: dict[Definition, int] = field(default_factory=dict)
    _tensors: dict[Definition, TensorValue] = field(default_factory=dict)
    _numels: dict[int, int] = field(default_factory=dict)
    _dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    _symbolic: dict[int, _SymbolicTensor] = field(default_factory=dict)
    _symbols: dict[str, int] = field(default_factory=dict)
    """Which value of the graph at hand made a symbolic size, by the name of the symbol."""

    _num_memories: int = 0

    def number(self, definition: Definition) -> int:
        """The number of what is defined so."""
        known = self._numbers.get(definition)
        if known is None:
            known = self._numbers[definition] = len(self.definitions)
            self.definitions.append(definition)
        return known

    def definition_of(self, number: int) -> Definition:
        """The definition of a number, with the form of a call written out: target, arguments."""
        definition = self.definitions[number]
        for index, part in enumerate(definition):
            if isinstance(part, CallForm):
                begin, end = index + 1, index + 1 + part.num_operands
                call = (part.target, *part.filled(definition[begin:end]))
                return (*definition[:index], *call, *definition[end:])
        return definition

    def atom(self, definition: Definition, *, numel: int, dtype: torch.dtype) -> int:
        """The number of a computed value with that many elements."""
        number = self.number(definition)
        self._numels[number] = numel
        self._dtypes[number] = dtype
        return number

    def memory(self, *, numel: int, dtype: torch.dtype) -> int:
        """A number for memory that can be written to: of this one, and of no other."""
        self._num_memories += 1
        return self.atom(("memory", (int, self._num_memories)), numel=numel, dtype=dtype)

    def numel_of(self, atom: int) -> int:
        """Number of elements of an atom."""
        return self._numels[atom]

    def dtype_of_atom(self, atom: int) -> torch.dtype:
        """The dtype of an atom's elements."""
        return self._dtypes[atom]

    def bits(self, atom: int, dtype: torch.dtype) -> int:
        """The elements of an atom, bit for bit taken as those of another dtype of the same size."""
        if self._dtypes[atom] == dtype:
            return atom
        definition = self.definitions[atom]
        if definition[0] == "bits":
            assert isinstance(definition[2], int)
            return self.bits(definition[2], dtype)
        return self.atom(("bits", dtype, atom), numel=self._numels[atom], dtype=dtype)

    def without_bits(self, contents: Contents) -> tuple[Contents, torch.dtype | None]:
        """What contents are bits of, and its dtype; themselves and None if they are not."""
        dtypes: set[torch.dtype] = set()
        for atom in atoms_of(contents):
            definition = self.definitions[atom]
            if definition[0] != "bits":
                return contents, None
            assert isinstance(definition[2], int)
            dtypes.add(self._dtypes[definition[2]])
        if len(dtypes) != 1:
            return contents, None
        (dtype,) = dtypes
        return self.map_atoms(contents, lambda atom: self.bits(atom, dtype)), dtype

    def dtype_of(self, value: TensorValue) -> torch.dtype | None:
        """The dtype of a tensor; None if it has no elements."""
        for atom in atoms_of(value.contents):
            return self._dtypes[atom]
        return None

    def tensor(self, shape: tuple[int, ...], contents: Contents) -> TensorValue:
        """The tensor of that shape with those contents."""
        key = (shape, contents)
        value = self._tensors.get(key)
        if value is None:
            atom = self._whole_atom(contents)
            parts = None if atom is None else self.parts_of_joined(atom)
            if parts is not None:
                value = self.tensor(shape, parts)
            else:
                value = TensorValue(len(self.definitions), shape, contents)
                self.definitions.append(("tensor", *key))
            self._tensors[key] = value
        return value

    def made_of(self, form: CallForm, source: Value) -> TensorValue | None:
        """What a call makes of its only operand, if another made the like of the like before.

        Args:
            form: of the call.
            source: the operand's value.

        Returns:
            None if no such call was noted: see ``note``.
        """
        if type(source) is not TensorValue or len(source.contents) != 1:
            return None
        piece = source.contents[0]
        if type(piece) is not Piece:
            return None
        atom, offset, dims = piece
        key = (form, source.shape, offset, dims, self._numels[atom], self._dtypes[atom])
        made = self._made.get(key)
        if made is None:
            return None
        if made.definition is not None:
            begin, end, numel, dtype = made.definition
            if self.parts_of_joined(atom) is not None:
                return None  # a rule reaches into it
            atom = self.atom((*begin, atom, *end), numel=numel, dtype=dtype)
        return self.tensor(made.shape, (Piece(atom, made.offset, made.dims),))

    def note(self, form: CallForm, source: Value, result: Value | None) -> None:
        """Remember what a call made of its operand, whichever atom that is a piece of.

        Args:
            form: of the call: nothing else may decide what it makes of such a piece.
            source: the operand's value.
            result: what the rule of the operator made of it.
        """
        if not isinstance(source, TensorValue) or not isinstance(result, TensorValue):
            return
        if len(source.contents) != 1 or len(result.contents) != 1:
            return
        piece, made = source.contents[0], result.contents[0]
        if not isinstance(piece, Piece) or not isinstance(made, Piece):
            return
        definition = None
        if made.atom != piece.atom:
            found = self.definitions[made.atom]
            places = [index for index, part in enumerate(found) if type(part) is int]
            if found[0] not in ("cast", "elementwise") or [found[i] for i in places] != [
                piece.atom
            ]:
                return
            (place,) = places
            numel, dtype = self._numels[made.atom], self._dtypes[made.atom]
            definition = (found[:place], found[place + 1 :], numel, dtype)
        numel, dtype = self._numels[piece.atom], self._dtypes[piece.atom]
        key = (form, source.shape, piece.offset, piece.dims, numel, dtype)
        self._made[key] = _MadeOfOnePiece(result.shape, made.offset, made.dims, definition)

    def joined_atom(self, contents: Contents) -> int:
        """One atom that stands for contents, where a piece of it cannot be described exactly."""
        atom = self._whole_atom(contents)
        if atom is not None:
            return atom
        dtype = next((self._dtypes[atom] for atom in atoms_of(contents)), torch.float32)
        return self.atom(("joined", contents), numel=num_elements(contents), dtype=dtype)

    def _whole_atom(self, contents: Contents) -> int | None:
        """The atom that the contents are all of, in its order; None for other contents."""
        if len(contents) != 1 or not isinstance(contents[0], Piece):
            return None
        atom, offset, dims = contents[0]
        if offset:
            return None
        numel = self._numels[atom]
        return atom if dims == (((numel, 1),) if numel > 1 else ()) else None

    def parts_of_joined(self, atom: int) -> Contents | None:
        """What a joined atom stands for; None for other atoms."""
        definition = self.definitions[atom]
        return definition[1] if definition[0] == "joined" else None  # type: ignore[return-value]

    def map_atoms(self, contents: Contents, function: Callable[[int], int]) -> Contents:
        """The same pieces of other atoms; reaches into joined ones."""
        if len(contents) == 1 and type(contents[0]) is Piece:  # of most tensors
            atom, offset, dims = contents[0]
            if self.parts_of_joined(atom) is None:
                return (Piece(function(atom), offset, dims),)

        def mapped_atom(atom: int) -> int:
            parts = self.parts_of_joined(atom)
            if parts is None:
                return function(atom)
            return self.joined_atom(self.map_atoms(parts, function))

        def mapped(piece: Piece) -> Piece:
            return Piece(mapped_atom(piece.atom), piece.offset, piece.dims)

        return tuple(
            mapped(item)
            if isinstance(item, Piece)
            else Rows(
                item.num_rows,
                tuple(Column(mapped(first), row_stride) for first, row_stride in item.columns),
            )
            for item in contents
        )

    def strided(self, value: TensorValue) -> tuple[int, int, tuple[int, ...]]:
        """A tensor as atom, offset and strides in elements; exact for every tensor with elements.

        Contents that are not a strided part of one atom become an atom of their own.
        """
        if len(value.contents) == 1 and isinstance(value.contents[0], Piece):
            piece = value.contents[0]
            strides = strides_for_shape(value.shape, piece.dims)
            if strides is not None:
                return piece.atom, piece.offset, strides
        atom = self.joined_atom(value.contents)
        steps = [math.prod(value.shape[dim + 1 :]) for dim in range(len(value.shape))]
        return atom, 0, tuple(steps)

    def from_strides(
        self, atom: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> TensorValue:
        """The tensor that walks an atom with these strides."""
        if 0 in shape:
            return self.tensor(shape, ())
        dims = merged_dims(zip(shape, strides, strict=True))
        return self.tensor(shape, (Piece(atom, offset, dims),))

    def columns(self, contents: Contents, count: int) -> tuple[Column, ...]:
        """The contents as equal rows; of one joined atom where no shorter description is exact."""
        columns = columns_of(contents, count)
        if columns is None:
            atom = self.joined_atom(contents)
            columns = columns_of(whole(atom, self._numels[atom]), count)
            assert columns is not None  # rows divide the elements
        return columns

    def result(self, definition: Definition, recorded: object) -> Value:
        """The value that something unknown computed, with the structure of what was recorded."""
        if isinstance(recorded, torch.Tensor):
            return self._opaque_tensor(definition, recorded)
        if isinstance(recorded, (tuple, list)):
            number = self.number(definition)
            items = tuple(
                self.result(("item", number, (int, index)), item)
                for index, item in enumerate(recorded)
            )
            return TupleValue(number, items)
        return OtherValue(self.number(definition))

    def bind_size(self, recorded: torch.SymInt, value: Value) -> None:
        """A symbolic size that ``value`` made: later sizes are known by it."""
        self._symbols.setdefault(str(recorded.node.expr), value.number)

    def size(self, recorded: torch.SymInt) -> OtherValue:
        """A size that was read or worked out: its expression in what made its symbols."""
        text = str(recorded.node.expr)
        maker = self._symbols.get(text)
        if maker is not None:
            return OtherValue(maker)
        return OtherValue(self.number(("size", self._canonical_text(text))))

    def begin_graph(self) -> None:
        """From now on symbols are those of another graph."""
        self._symbols.clear()

    def exchanges_of(self, value: Value) -> tuple[str, ...]:
        """The exchanges between ranks of which the result of a launch consists.

        Exchanges are numbered as they are first asked for, or as a rule foresees them. Ranks whose
        graphs launch the same collectives, and whose passes did the same, give the same numbers.
        """
        if isinstance(value, TupleValue):
            return tuple(number for item in value.items for number in self.exchanges_of(item))
        made = list(atoms_of(value.contents)) if isinstance(value, TensorValue) else []
        made = made or [value.number]  # where this rank has no elements, too
        return tuple(map(self.exchange, made))

    def exchange(self, number: int, assumption: str = "") -> str:
        """What an exchange is called, the first time by its number and what is assumed of it.

        A rule that says what another graph may exchange instead asks for it in the graph that it
        is applied to: the other graph may have its exchanges in any order.

        Args:
            number: of the atom that it makes; in bits of another dtype it is the same exchange.
            assumption: what must be the same on all ranks for the rule to be right.
        """
        definition = self.definitions[number]
        if definition[0] == "bits":
            assert isinstance(definition[2], int)
            return self.exchange(definition[2], assumption)
        return self._exchanges.setdefault(number, f"{len(self._exchanges)}{assumption}")

    def tuple_of(self, items: tuple[Value, ...]) -> TupleValue:
        """Several values together."""
        return TupleValue(self.number(("tuple", *(item.number for item in items))), items)

    def symbolic_view(self, source: OtherValue, recorded: object) -> Value | None:
        """A view of a tensor with symbolic sizes, told apart by its sizes, strides and offset.

        A chain of views that ends where it began is the tensor that it began with. None for a view
        with a size or an offset of its own, as of a slice between bounds that only data know.
        """
        known = self._symbolic.get(source.number)
        if known is None or not isinstance(recorded, torch.Tensor):
            return None
        signed = signature(recorded)
        if any(name not in self._symbols for name in symbols_of(signed)):
            return None
        layout = self._layout(signed)
        if layout == known.base_layout:
            return OtherValue(known.base)
        definition = ("view", known.base, layout)
        if all(type(size) is int for size in recorded.shape):
            return self.result(definition, recorded)
        number = self.number(definition)
        if number not in self._symbolic:
            self._symbolic[number] = known._replace(
                layout=layout, is_row_major=is_row_major(signed)
            )
        return OtherValue(number)

    def symbolic_reshape(self, source: OtherValue, recorded: object) -> Value | None:
        """The elements of a tensor with symbolic sizes in another shape: viewed, or copied.

        Where the elements do not lie in order, ``reshape`` copies them: sizes and strides of the
        copy say nothing about which elements of the source it has.
        """
        known = self._symbolic.get(source.number)
        if known is None or not known.is_row_major:
            return None
        return self.symbolic_view(source, recorded)

    def symbolic_copy(self, source: OtherValue, recorded: object) -> Value | None:
        """A copy of a tensor with symbolic sizes: the same, unless its strides or dtype differ."""
        known = self._symbolic.get(source.number)
        if known is None or not isinstance(recorded, torch.Tensor):
            return None
        layout = self.layout(recorded)
        if layout == known.layout:
            return source
        return self.result(("copy", source.number, layout), recorded)

    def layout(self, recorded: torch.Tensor) -> str:
        """Sizes, strides, offset and dtype, with symbols by the values that made them."""
        return self._layout(signature(recorded))

    def _opaque_tensor(self, definition: Definition, recorded: torch.Tensor) -> Value:
        shape = tuple(recorded.shape)
        if set(map(type, shape)) <= _ONLY_INTS:
            numel = math.prod(shape)
            atom = self.atom(definition, numel=numel, dtype=recorded.dtype)
            return self.tensor(shape, whole(atom, numel))
        number = self.number(definition)
        signed = signature(recorded)
        # How many rows ``nonzero`` finds is as much a result of it as the rows are.
        for index, name in enumerate(dict.fromkeys(symbols_of(signed))):
            if name not in self._symbols:
                self._symbols[name] = self.number(("size of", number, (int, index)))
        if number not in self._symbolic:
            layout = self._layout(signed)
            self._symbolic[number] = _SymbolicTensor(number, layout, layout, is_row_major(signed))
        return OtherValue(number)

    def _layout(self, signed: Hashable) -> str:
        assert isinstance(signed, TensorSignature)  # what a tensor has
        return self._canonical_text(str(signed._replace(device=None)))  # type: ignore[arg-type]  # text only

    def _canonical_text(self, text: str) -> str:
        return _SYMBOL.sub(self._canonical_symbol, text)

    def _canonical_symbol(self, match: re.Match[str]) -> str:
        maker = self._symbols.get(match[0])
        return match[0] if maker is None else f"value{maker}"


Rule = Callable[[ValueTable, Arguments, Any], Value | None]
"""What an operator does: from its arguments, and what was recorded for the call, to its value. None
where the rule does not apply."""
