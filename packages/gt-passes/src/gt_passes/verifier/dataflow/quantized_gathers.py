"""What may be said of a parameter before it is gathered as well as afterwards: its scaled cast.

Three rules, each exact, by which a parameter that is quantized and then gathered is the parameter
that was gathered and then quantized:

- The largest magnitude of all that ranks gather is the largest of the largest of each rank's part::

      max(abs(all_gather(x))) = all_reduce(max(abs(x)), "max")

- Scaled by a number that all of these ranks have in common, and cast to 8 bits, an element is the
  same on the rank that has it and on those that gather it::

      q(x) = float8(clamp(float32(x) * s, -m, m))        # products in float32
      q(all_gather(x)) = all_gather(q(x))

- Bytes are gathered as what they stand for::

      all_gather(view(x, uint8)) = view(all_gather(x), uint8)

What ranks exchange by these rules and not in the graph at hand, another graph may: the table
numbers it where the rule is applied, so that ranks whose buckets have it in other orders differ.

A maximum counts only if it is of everything that is gathered, each element once, or of all but
padding behind it: each rank sees that what it gives there itself is zeros, and how many elements
are no padding is part of what the exchange is called. Of any other part, ranks may have cut
elsewhere. A number is in common to the ranks of a group if it comes of a maximum reduced over that
very group, by exact arithmetic with constants, and by further maxima over groups that are axes of
one mesh with it. Powers of two are made by ``log2`` and ``exp2`` too, which ranks of one build on
one kind of device approximate alike. That all ranks do the same arithmetic by the same constants no
single graph shows: a digest of it is part of what the exchange is called, and ranks compare that.
Nothing else that treats elements alike is moved past a gathering: what it does may be another thing
on another rank, and nobody compares it.

A maximum of a tensor with NaN is NaN, and backends differ in whether reducing it over ranks is: the
first rule is of numbers.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from gt_passes.analysis.exact_operators import APPROXIMATED_OPERATORS, EXACT_OPERATORS
from gt_passes.analysis.graph_constants import frozen_literal
from gt_passes.analysis.process_groups import (
    are_axes_of_one_mesh,
    group_identity,
    place_in_group,
)
from gt_passes.verifier.dataflow.collective_dataflow import all_reduce, as_gathered
from gt_passes.verifier.dataflow.flat_contents import (
    Contents,
    Dims,
    Piece,
    atoms_of,
    num_elements,
    slice_contents,
    whole,
)
from gt_passes.verifier.dataflow.value_table import (
    Arguments,
    Definition,
    TensorValue,
    Value,
    ValueTable,
)

_aten = torch.ops.aten
_COMMON = EXACT_OPERATORS | APPROXIMATED_OPERATORS
_FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


def maximum(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``max`` of all elements, in any order: reduced over ranks, if it is of what they gather."""
    source = arguments[0]
    if len(arguments) != 1 or not isinstance(source, TensorValue) or not source.contents:
        return None
    taken = _taken_once(table, source.contents)
    reduced = None if taken is None else _reduced_over_ranks(table, *taken, recorded)
    if reduced is not None:
        return reduced
    is_all = taken is not None and taken[1] == table.numel_of(taken[0])
    atom = taken[0] if taken is not None and is_all else table.joined_atom(source.contents)
    return table.tensor((), whole(_maximum_of(table, atom), 1))


def scaled(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``mul`` of a tensor and a tensor of one number, without dims: every element alike."""
    source, scale = arguments
    if not isinstance(source, TensorValue) or not isinstance(scale, TensorValue):
        return None
    if scale.shape or not isinstance(recorded, torch.Tensor):
        return None
    number = table.joined_atom(scale.contents)

    def scaled_atom(atom: int) -> int:
        return _scaled_atom(table, atom, number, recorded.dtype)

    return table.tensor(source.shape, table.map_atoms(source.contents, scaled_atom))


def same_bits(table: ValueTable, arguments: Arguments, recorded: Any) -> Value | None:
    """``view`` as another dtype with elements of the same size."""
    source = arguments[0]
    if not isinstance(source, TensorValue) or not isinstance(recorded, torch.Tensor):
        return None
    given = table.dtype_of(source)
    if given is None or given.itemsize != recorded.dtype.itemsize:
        return None
    atoms = table.map_atoms(source.contents, lambda atom: table.bits(atom, recorded.dtype))
    return table.tensor(source.shape, atoms)


def quantized_gather(table: ValueTable, atom: int, dtype: torch.dtype) -> int | None:
    """The gathered parts, quantized, for the cast to 8 bits of a gathered tensor, scaled.

    Args:
        table: knows the atom.
        atom: what is cast.
        dtype: to which.

    Returns:
        None where the atom is anything else.
    """
    if dtype not in _FLOAT8:
        return None
    bounds = tuple(map(frozen_literal, (-torch.finfo(dtype).max, torch.finfo(dtype).max)))
    clamped = table.definitions[atom]
    is_clamped = clamped[:2] == ("elementwise", _aten.clamp.default) and clamped[3:] == bounds
    product = table.definitions[_number(clamped[2])] if is_clamped else clamped
    if product[:2] != ("scaled", torch.float32) or table.dtype_of_atom(atom) != torch.float32:
        return None
    wide, scale = _number(product[2]), _number(product[3])
    if table.dtype_of_atom(wide) != torch.float32:
        return None
    given = table.definitions[wide]
    is_cast = given[:2] == ("cast", torch.float32)
    gathering = table.definitions[_number(given[2])] if is_cast else given
    if gathering[0] != "all_gather":
        return None
    steps = _steps_from_maximum(table, scale, gathering[2])
    if steps is None:
        return None

    def quantized(part: int) -> int:
        if is_cast:
            part = _derived(table, ("cast", torch.float32, part), part, torch.float32)
        part = _scaled_atom(table, part, scale, torch.float32)
        if is_clamped:
            definition = ("elementwise", _aten.clamp.default, part, *bounds)
            part = _derived(table, definition, part, torch.float32)
        return _derived(table, ("cast", dtype, part), part, dtype)

    found = as_gathered(table, gathering, table.map_atoms(_parts(table, gathering), quantized))
    same_on_all_ranks = (*steps, is_cast, is_clamped, dtype)
    digest = hashlib.sha256(" ".join(map(str, same_on_all_ranks)).encode()).hexdigest()
    table.exchange(found, f" quantized by {digest[:16]}")
    return found


def is_cast_to_float8(recorded: object) -> bool:
    """Whether a result has 8 bits, so that more than the form of a cast decides what it is."""
    return isinstance(recorded, torch.Tensor) and recorded.dtype in _FLOAT8


def _reduced_over_ranks(table: ValueTable, atom: int, count: int, recorded: Any) -> Value | None:
    """The maximum over ranks, for that of the magnitudes of a gathered tensor or of its first ones.

    None for anything else, and where what is behind those may be something else than padding.
    """
    gathered = _magnitudes_gathered(table, atom)
    if gathered is None:
        return None
    gathering, magnitudes = gathered
    is_all = count == table.numel_of(atom)
    if not is_all and not _is_padded_by_zeros(table, gathering, count):
        return None
    local = table.tensor((), whole(_maximum_of(table, table.joined_atom(magnitudes)), 1))
    reduced = all_reduce(table, (local, "max", gathering[2]), recorded)
    assert isinstance(reduced, TensorValue)  # of a tensor with an element
    # Ranks compare how many elements each of them takes for no padding.
    assumption = "" if is_all else f" of the first {count} gathered"
    names = [table.exchange(each, assumption) for each in atoms_of(reduced.contents)]
    return reduced if all(name.endswith(assumption) for name in names) else None


def _magnitudes_gathered(table: ValueTable, atom: int) -> tuple[Definition, Contents] | None:
    """Of the magnitudes of a gathered tensor: the gathering, and the magnitudes of one part."""
    definition = table.definitions[atom]
    if definition[:2] != ("elementwise", _aten.abs.default):
        return None
    gathering = table.definitions[_number(definition[2])]
    if gathering[0] != "all_gather":
        return None
    dtype = table.dtype_of_atom(atom)

    def magnitude(part: int) -> int:
        return _derived(table, ("elementwise", _aten.abs.default, part), part, dtype)

    return gathering, table.map_atoms(_parts(table, gathering), magnitude)


def _steps_from_maximum(table: ValueTable, atom: int, group: object) -> tuple[object, ...] | None:
    """How a number is made of a maximum reduced over a group; None if it is not in common to it."""
    steps: list[object] = []
    while True:
        definition = table.definitions[atom]
        match definition:
            case ("all_reduce", "max", over, int(reduced)):
                if over == group:
                    return tuple(steps)
                if not isinstance(over, str) or not isinstance(group, str):
                    return None
                if not are_axes_of_one_mesh(over, group):
                    return None
                steps.append(("max", str(group_identity(over))))
                atom = reduced
            case ("cast", dtype, int(source)):
                steps.append(dtype)
                atom = source
            case ("elementwise", target, int(source), *constants) if target in _COMMON:
                steps.append((str(target), *constants))
                atom = source
            case _:
                return None


def _parts(table: ValueTable, gathering: Definition) -> Contents:
    """What this rank gives to a gathering."""
    unit = _number(gathering[-1])
    return table.parts_of_joined(unit) or whole(unit, table.numel_of(unit))


def _maximum_of(table: ValueTable, atom: int) -> int:
    return table.atom(("maximum", atom), numel=1, dtype=table.dtype_of_atom(atom))


def _scaled_atom(table: ValueTable, atom: int, scale: int, dtype: torch.dtype) -> int:
    return _derived(table, ("scaled", dtype, atom, scale), atom, dtype)


def _derived(table: ValueTable, definition: Definition, atom: int, dtype: torch.dtype) -> int:
    return table.atom(definition, numel=table.numel_of(atom), dtype=dtype)


def _taken_once(table: ValueTable, contents: Contents) -> tuple[int, int] | None:
    """The atom whose first elements contents are, each once, in whichever order; and how many."""
    if len(contents) != 1 or not isinstance(contents[0], Piece):
        return None
    atom, offset, dims = contents[0]
    if offset or not _takes_each_once(dims):
        return None
    return atom, math.prod(size for size, _ in dims)


def _is_padded_by_zeros(table: ValueTable, gathering: Definition, count: int) -> bool:
    """Whether all are zeros that this rank gives behind the first ``count`` of what is gathered."""
    place = place_in_group(str(gathering[2]))
    if place is None:
        return False
    parts = _parts(table, gathering)
    length = num_elements(parts)
    padding = slice_contents(parts, max(0, min(length, count - place * length)), length)
    return all(_is_zero(table, atom) for atom in atoms_of(padding))


def _is_zero(table: ValueTable, atom: int) -> bool:
    definition = table.definition_of(atom)
    while definition[0] == "cast":
        definition = table.definition_of(_number(definition[2]))
    return definition[:2] in (("call", _aten.new_zeros.default), ("call", _aten.zeros.default))


def _takes_each_once(dims: Dims) -> bool:
    expected = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _number(part: object) -> int:
    assert type(part) is int  # where a definition has the number of a value
    return part
