"""Do the steps of a redistribution lead from one layout to the other? Seen by taking them.

Whether an order of steps is right is easy to get wrong where two axes shard one dim, so nothing is
argued here: a miniature of the tensor is cut over a miniature of the mesh (two ranks an axis), each
rank knows which cells of the tensor and which summands of them it has, every step moves them as
its collective would, and the end must be what the target layout means. The shapes of the real
tensor are followed beside it, by arithmetic of this file.

Nothing of ``redistribution.py`` or ``layouts.py`` but the data types is used: they are what is
checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch.distributed.tensor import Partial, Shard

from gt_autoparallel.audit.shards import shard_shape
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.redistribution import RedistributionStep

_Ranks = tuple[int, ...]
"""A rank's coordinates on the mesh."""

_Cells = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What one rank has of the miniature."""

    cells: tuple[_Cells, ...]
    """The indices that a rank has of each dim, in order; it has their product."""

    summands: frozenset[_Ranks]
    """Which of the parts of a sum are in its numbers already."""


class _StepError(Exception):
    """A step cannot be taken, or does not do what its kind says."""


def step_problems(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    steps: Sequence[RedistributionStep],
    mesh: MeshShape,
) -> list[str]:
    """What is wrong with the steps of a tensor of global ``shape``; empty if nothing."""
    moves = tuple(replace(step, input_shape=(), output_shape=()) for step in steps)
    small = tuple(min(size, 2) for size in mesh.sizes)
    problems = list(_walk(len(shape), source, target, moves, small))
    return problems or list(_shape_problems(shape, source, target, steps, mesh.sizes))


@lru_cache(maxsize=4096)
def _walk(
    num_dims: int,
    source: Layout,
    target: Layout,
    moves: tuple[RedistributionStep, ...],
    sizes: tuple[int, ...],
) -> tuple[str, ...]:
    """Take the moves, which are steps without shapes, on the miniature."""
    try:
        holdings = _holdings(num_dims, source, sizes)
        for move in moves:
            holdings = _after(move, holdings, num_dims, sizes)
        wanted = _holdings(num_dims, target, sizes)
    except _StepError as error:
        return (str(error),)
    if holdings != wanted:
        return ("the steps end in another layout than the wanted one",)
    return ()


def _holdings(num_dims: int, layout: Layout, sizes: Sequence[int]) -> dict[_Ranks, _Holding]:
    """What each rank of the miniature has in a layout."""
    cells_of_dim = 2 ** len(sizes)
    partial = [axis for axis, placement in enumerate(layout) if isinstance(placement, Partial)]
    holdings = {}
    for rank in itertools.product(*(range(size) for size in sizes)):
        cells: list[_Cells] = [tuple(range(cells_of_dim))] * num_dims
        for axis, placement in enumerate(layout):
            if not isinstance(placement, Shard):
                continue
            if not 0 <= placement.dim < num_dims:
                raise _StepError(f"{placement} of a tensor of {num_dims} dims")
            cells[placement.dim] = _piece(cells[placement.dim], rank[axis], sizes[axis])
        # Along axes that hold no partial sums, all ranks have the same summands: all of them.
        own = frozenset({tuple(rank[axis] if axis in partial else 0 for axis in range(len(sizes)))})
        holdings[rank] = _Holding(cells=tuple(cells), summands=_spread(own, partial, layout, sizes))
    return holdings


def _spread(
    own: frozenset[_Ranks], partial: Sequence[int], layout: Layout, sizes: Sequence[int]
) -> frozenset[_Ranks]:
    """Summands over axes that are not partial: every coordinate is in, so that sums compare."""
    ranges = [
        (None,) if axis in partial else tuple(range(sizes[axis])) for axis in range(len(layout))
    ]
    return frozenset(
        tuple(part[axis] if value is None else value for axis, value in enumerate(values))
        for part in own
        for values in itertools.product(*ranges)
    )


def _after(
    move: RedistributionStep,
    holdings: dict[_Ranks, _Holding],
    num_dims: int,
    sizes: Sequence[int],
) -> dict[_Ranks, _Holding]:
    """What each rank has after one move."""
    if not 0 <= move.axis < len(sizes):
        raise _StepError(f"a step runs along axis {move.axis}, which the mesh does not have")
    for dim in (move.source_dim, move.target_dim):
        if dim is not None and not 0 <= dim < num_dims:
            raise _StepError(f"a step names dim {dim} of a tensor of {num_dims} dims")
    result = {}
    for rank in holdings:
        group = [
            holdings[(*rank[: move.axis], i, *rank[move.axis + 1 :])]
            for i in range(sizes[move.axis])
        ]
        result[rank] = _of_one_rank(move, group, rank[move.axis])
    return result


def _of_one_rank(move: RedistributionStep, group: Sequence[_Holding], place: int) -> _Holding:
    """What the rank at ``place`` of its group has after the move."""
    given, taken = move.source_dim, move.target_dim
    dims = (given is not None, taken is not None)
    match move.kind, dims:
        case "all_gather", (True, False):
            assert given is not None
            return _gathered(group, given)
        case "all_reduce", (False, False):
            return _summed(group)
        case "reduce_scatter", (False, True):
            assert taken is not None
            return _cut(_summed(group), taken, place, len(group))
        case "all_to_all", (True, True) if given != taken:
            assert given is not None
            assert taken is not None
            pieces = [_cut(holding, taken, place, len(group)) for holding in group]
            return _gathered(pieces, given)
        case "slice", (False, True):
            assert taken is not None
            if any(holding != group[0] for holding in group):
                raise _StepError("a slice of a tensor that the axis does not replicate")
            return _cut(group[place], taken, place, len(group))
    raise _StepError(f"{move.kind} from dim {given} to dim {taken} is no step")


def _gathered(group: Sequence[_Holding], dim: int) -> _Holding:
    """The pieces of a group side by side."""
    first = group[0]
    for holding in group:
        others = [
            c == f
            for d, (c, f) in enumerate(zip(holding.cells, first.cells, strict=True))
            if d != dim
        ]
        if holding.summands != first.summands or not all(others):
            raise _StepError("pieces are gathered that are not pieces of one tensor")
    cells = tuple(itertools.chain.from_iterable(holding.cells[dim] for holding in group))
    if len(set(cells)) != len(cells):
        raise _StepError(f"dim {dim} is gathered along an axis that does not shard it")
    return replace(first, cells=_with(first.cells, dim, cells))


def _summed(group: Sequence[_Holding]) -> _Holding:
    """The sum of a group's tensors."""
    first = group[0]
    if any(holding.cells != first.cells for holding in group):
        raise _StepError("tensors are summed that are different pieces")
    summands: frozenset[_Ranks] = frozenset()
    for holding in group:
        if summands & holding.summands:
            raise _StepError("a sum counts the same numbers more than once")
        summands |= holding.summands
    return replace(first, summands=summands)


def _cut(holding: _Holding, dim: int, place: int, count: int) -> _Holding:
    return replace(
        holding, cells=_with(holding.cells, dim, _piece(holding.cells[dim], place, count))
    )


def _piece(cells: _Cells, place: int, count: int) -> _Cells:
    size = len(cells) // count
    return cells[place * size : (place + 1) * size]


def _with(cells: tuple[_Cells, ...], dim: int, new: _Cells) -> tuple[_Cells, ...]:
    return (*cells[:dim], new, *cells[dim + 1 :])


def _shape_problems(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    steps: Sequence[RedistributionStep],
    sizes: Sequence[int],
) -> Iterator[str]:
    """Shapes of one rank's real tensor, before and after each step."""
    current = shard_shape(shape, source, sizes)
    for number, step in enumerate(steps):
        if step.input_shape != current:
            yield f"step {number} takes {step.input_shape}, but there is {current}"
        grown = list(current)
        if step.source_dim is not None:
            grown[step.source_dim] *= sizes[step.axis]
        if step.target_dim is not None:
            if grown[step.target_dim] % sizes[step.axis]:
                yield f"step {number} cuts dim {step.target_dim} of {current} unevenly"
            grown[step.target_dim] //= sizes[step.axis]
        current = tuple(grown)
        if step.output_shape != current:
            yield f"step {number} gives {step.output_shape}, but makes {current}"
    if current != shard_shape(shape, target, sizes):
        yield f"the steps end in shape {current}"
