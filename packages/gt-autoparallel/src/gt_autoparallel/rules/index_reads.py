"""What a function of FlexAttention does with the number of a sample or of a head.

On a shard, samples and heads are numbered from zero. That is right for a function that uses the
number to look something up in a tensor of which the rank has the same part, and wrong for every
other use: a slope that is computed from the head's number would be another head's. So every step of
the function that reads the number is looked at, and what is not known to be right forbids to cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gt_autoparallel.graph.function_graph import FunctionGraph, FunctionStep
from gt_autoparallel.graph.placement_graph import Value

_aten = torch.ops.aten
_LOOK_UP = _aten.index.Tensor
_SHAPED_LIKE_AN_INDEX = frozenset(
    {
        _aten.new_ones.default,
        _aten.new_zeros.default,
        _aten.new_full.default,
        _aten.new_empty.default,
        _aten.ones_like.default,
        _aten.zeros_like.default,
        _aten.full_like.default,
    }
)
"""Constants for which an operand gives a shape and a device, and nothing of its value."""

_SCATTER = "flex_lib::zeros_and_scatter"
"""Gradient of a look-up: (shape, indices, gradients) -> zeros of the shape, with these added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTensor:
    """How a function reads a tensor that it is given: at the number, along one of its dims."""

    input: int
    dim: int | None
    """None where none of its dims is looked up by the number."""


def reads(
    function: FunctionGraph, number: int, tensors: Sequence[int]
) -> tuple[ReadTensor, ...] | None:
    """How a function reads its tensors by a number, each of them that it reads at all.

    Args:
        function: scores, a mask, or scores with their gradients.
        number: which of its inputs is the number.
        tensors: which of its inputs are tensors of the caller's.

    Returns:
        None if a shard with numbers of its own would compute something else.
    """
    found: dict[int, set[int | None]] = {}
    for step in function.steps:
        for tensor in tensors:
            if tensor in step.operands() and step.target not in _SHAPED_LIKE_AN_INDEX:
                found.setdefault(tensor, set()).add(_looked_up_dim(step, tensor, number))
    if any(result == number for result in function.results()):
        return None
    for _, step in function.read_by(number):
        if step.target in _SHAPED_LIKE_AN_INDEX or _scatters_at(step, number):
            continue
        if all(_looked_up_dim(step, tensor, number) is None for tensor in tensors):
            return None
    if any(len(dims) != 1 for dims in found.values()):
        return None
    # What a function gives back as it is, it reads whole.
    whole = [tensor for tensor in tensors if tensor in function.results()]
    if any(found.get(tensor, {None}) != {None} for tensor in whole):
        return None
    return tuple(ReadTensor(input=tensor, dim=dim) for tensor, (dim,) in found.items())


def scatter_dims(step: FunctionStep, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The dims of what a scatter makes that some numbers index: (number, dim)."""
    indices = step.args[1]
    for dim, index in enumerate(indices):
        if isinstance(index, Value) and index.node in numbers:
            yield index.node, dim


def is_scatter(step: FunctionStep) -> bool:
    """Whether a step is the gradient of a look-up."""
    return step.target is not None and step.target._schema.name == _SCATTER


def _scatters_at(step: FunctionStep, number: int) -> bool:
    """Whether a step is the gradient of a look-up by the number, and reads it for nothing else."""
    return is_scatter(step) and len(list(scatter_dims(step, (number,)))) == _uses(step, number) == 1


def _uses(step: FunctionStep, value: int) -> int:
    return step.operands().count(value)


def _looked_up_dim(step: FunctionStep, tensor: int, number: int) -> int | None:
    """The dim along which a step looks up the number in a tensor; None if it does not do so."""
    if step.target is not _LOOK_UP or step.args[0] != Value(tensor) or _uses(step, tensor) > 1:
        return None
    dims = [dim for dim, index in enumerate(step.args[1]) if index == Value(number)]
    return dims[0] if len(dims) == 1 else None
