"""How a tensor gets from one layout to another, in steps that all of the package shares.

One list of steps is priced by the planner, counted by the prediction and run by the placed model,
so that what is predicted is what happens. Each step works along one mesh axis. Where two axes
shard one dim, the later axis cuts the pieces of the earlier one, so the later one must be undone
first and made last; a way that this forbids goes through ``Replicate()``.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.layouts import (
    Layout,
    MeshShape,
    fits,
    local_shape,
    shard_counts,
    short_text,
)

__all__ = [
    "RedistributionStep",
    "StepKind",
    "can_redistribute",
    "divisors",
    "layouts_on_the_way",
    "redistribution_steps",
    "step_between",
]

StepKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"]
"""all_gather: S(d) -> R. reduce_scatter: P -> S(d). all_reduce: P -> R. all_to_all: S(a) -> S(b).
slice: R -> S(d), local: no communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionStep:
    """One collective, or one local slice, along one mesh axis."""

    kind: StepKind
    axis: int
    """Index of the mesh axis."""

    source_dim: int | None
    """Sharded dim before the step: of all_gather and all_to_all."""

    target_dim: int | None
    """Sharded dim after the step: of reduce_scatter, all_to_all and slice."""

    input_shape: tuple[int, ...]
    """Shape of each rank's tensor before the step."""

    output_shape: tuple[int, ...]
    """Shape of each rank's tensor after the step."""

    @property
    def num_elements(self) -> int:
        """On one rank, the larger of what goes in and what comes out."""
        return max(math.prod(self.input_shape), math.prod(self.output_shape))


def can_redistribute(source: Layout, target: Layout) -> bool:
    """Whether there is a way: sums stay unfinished only where they were so before."""
    return all(
        isinstance(before, Partial) or not isinstance(after, Partial)
        for before, after in zip(source, target, strict=True)
    )


def redistribution_steps(
    shape: Sequence[int], source: Layout, target: Layout, mesh: MeshShape
) -> tuple[RedistributionStep, ...]:
    """The cheapest order of single-axis steps from ``source`` to ``target``.

    Each axis is only ever in its placement before, its placement after, or replicated, and every
    layout on the way cuts the tensor evenly. The cheapest order is the one in which a rank sends
    the fewest elements; among equals the one that sends fewer along earlier axes, which usually
    have the slower links; then the one with fewer steps. Axes of size 1 move nothing and have no
    step.

    Args:
        shape: of the global tensor.
        source: layout before; fits the shape.
        target: layout after; fits the shape.
        mesh: sizes of the axes.

    Raises:
        ValueError: a layout does not fit the shape, or an axis would have to become partial.
    """
    shape = tuple(shape)
    problems = [
        f"{name} {short_text(layout)} does not cut shape {shape!r} evenly"
        for name, layout in (("source", source), ("target", target))
        if not fits(shape, layout, mesh)
    ]
    if not can_redistribute(source, target):
        problems.append(
            f"{short_text(source)} cannot become {short_text(target)}: only a sum that is partial "
            "before can be partial after"
        )
    if problems:
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        raise ValueError(f"redistribution on mesh {sizes!r}: " + "; ".join(problems))
    return _steps(shape, source, target, mesh)


@lru_cache(maxsize=1 << 16)
def _steps(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: MeshShape
) -> tuple[RedistributionStep, ...]:
    layouts = layouts_on_the_way(divisors(shape, mesh), source, target, mesh)
    return tuple(_step(shape, before, after, mesh) for before, after in itertools.pairwise(layouts))


Divisors = tuple[frozenset[int], ...]
"""For each dim, which products of sizes of mesh axes divide it: all that the way depends on."""


@lru_cache(maxsize=1 << 12)
def divisors(shape: tuple[int, ...], mesh: MeshShape) -> Divisors:
    """What of a shape decides which layouts fit it."""
    products = {
        math.prod(chosen)
        for count in range(1, mesh.num_axes + 1)
        for chosen in itertools.combinations(mesh.sizes, count)
    }
    return tuple(frozenset(p for p in products if size % p == 0) for size in shape)


@lru_cache(maxsize=1 << 18)
def layouts_on_the_way(
    dims: Divisors, source: Layout, target: Layout, mesh: MeshShape
) -> tuple[Layout, ...]:
    """The layouts from ``source`` to ``target``, both included, that one step each connects.

    Args:
        dims: what ``divisors`` says of the shape.
        source: layout before.
        target: layout after.
        mesh: sizes of the axes.
    """
    source, target = (_without_trivial_axes(layout, mesh) for layout in (source, target))
    direct = _direct_order(source, target)
    if direct is not None:
        return tuple(direct)
    # The way depends on the dims that are cut, not on their places: many pairs are one problem.
    cut = list(dict.fromkeys(p.dim for p in (*source, *target) if isinstance(p, Shard)))
    place = {dim: number for number, dim in enumerate(cut)}
    way = _way_of_cut_dims(
        tuple(dims[dim] for dim in cut),
        _renumbered(source, place),
        _renumbered(target, place),
        mesh,
    )
    back = dict(enumerate(cut))
    return tuple(_renumbered(layout, back) for layout in way)


@lru_cache(maxsize=1 << 16)
def _way_of_cut_dims(
    dims: Divisors, source: Layout, target: Layout, mesh: MeshShape
) -> tuple[Layout, ...]:
    return tuple(_cheapest_order(dims, source, target, mesh))


def _renumbered(layout: Layout, place: Mapping[int, int]) -> Layout:
    return tuple(Shard(place[p.dim]) if isinstance(p, Shard) else p for p in layout)


def _without_trivial_axes(layout: Layout, mesh: MeshShape) -> Layout:
    if 1 not in mesh.sizes:
        return layout
    return tuple(
        Replicate() if size == 1 else placement
        for placement, size in zip(layout, mesh.sizes, strict=True)
    )


_DIRECT_RANK = {"slice": 0, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 3, "all_gather": 4}


def _direct_order(source: Layout, target: Layout) -> list[Layout] | None:
    """Layouts on the way if no dim is cut along two axes anywhere: no step hinders another.

    What shrinks the tensor goes first, what lets it grow last; among growing ones the earlier axis
    is first, among shrinking ones last, so that the earlier axis carries less.
    """
    axis_of_dim: dict[int, int] = {}
    for layout in (source, target):
        for axis, placement in enumerate(layout):
            if isinstance(placement, Shard) and axis_of_dim.setdefault(placement.dim, axis) != axis:
                return None
    changes = []
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        if before != after:
            kind = _kind(before, after)
            order = -axis if kind in ("slice", "reduce_scatter") else axis
            changes.append((_DIRECT_RANK[kind], order, axis))
    layouts = [source]
    for _, _, axis in sorted(changes):
        layouts.append(_replaced(layouts[-1], axis, target[axis]))
    return layouts


def _cheapest_order(
    dims: Divisors, source: Layout, target: Layout, mesh: MeshShape
) -> list[Layout]:
    """Dijkstra's algorithm over the layouts that the axes' allowed placements combine to."""
    choices = [
        list(dict.fromkeys((before, after, Replicate())))
        for before, after in zip(source, target, strict=True)
    ]
    start = (0,) * (mesh.num_axes + 2)
    ticket = itertools.count()
    queue: list[tuple[tuple[int, ...], int, Layout]] = [(start, next(ticket), source)]
    best: dict[Layout, tuple[int, ...]] = {source: start}
    came_from: dict[Layout, Layout] = {}
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == target:
            way = [layout]
            while way[-1] != source:
                way.append(came_from[way[-1]])
            return way[::-1]
        if cost > best[layout]:
            continue
        for axis, neighbor in _neighbors(dims, layout, choices, mesh):
            total = _added(cost, axis, layout, neighbor, mesh)
            if neighbor not in best or total < best[neighbor]:
                best[neighbor] = total
                came_from[neighbor] = layout
                heapq.heappush(queue, (total, next(ticket), neighbor))
    raise AssertionError("gathering everything and slicing it again is always a way")


def _neighbors(
    dims: Divisors, layout: Layout, choices: Sequence[Sequence[Placement]], mesh: MeshShape
) -> Iterator[tuple[int, Layout]]:
    for axis, placements in enumerate(choices):
        for placement in placements:
            if placement == layout[axis] or isinstance(placement, Partial):
                continue
            if _is_innermost(layout, axis, layout[axis]) and _is_innermost(layout, axis, placement):
                neighbor = _replaced(layout, axis, placement)
                counts = shard_counts(len(dims), neighbor, mesh)
                if all(c == 1 or c in d for c, d in zip(counts, dims, strict=True)):
                    yield axis, neighbor


def _is_innermost(layout: Layout, axis: int, placement: Placement) -> bool:
    """Whether no later axis cuts the pieces that ``placement`` on ``axis`` makes."""
    return not isinstance(placement, Shard) or placement not in layout[axis + 1 :]


def _added(
    cost: tuple[int, ...], axis: int, before: Layout, after: Layout, mesh: MeshShape
) -> tuple[int, ...]:
    """(elements sent, those along axis 0, along axis 1, ..., steps), with those of one more step.

    Elements are those of a tensor that every layout cuts evenly: only their proportions matter.
    """
    pieces = min(
        math.prod(size for p, size in zip(layout, mesh.sizes, strict=True) if isinstance(p, Shard))
        for layout in (before, after)
    )
    rounds = {"slice": 0, "all_reduce": 2}.get(_kind(before[axis], after[axis]), 1)
    sent = rounds * (mesh.num_ranks**2 // pieces // mesh.sizes[axis]) * (mesh.sizes[axis] - 1)
    total = [cost[0] + sent, *cost[1:-1], cost[-1] + 1]
    total[1 + axis] += sent
    return tuple(total)


def _replaced(layout: Layout, axis: int, placement: Placement) -> Layout:
    return (*layout[:axis], placement, *layout[axis + 1 :])


def _kind(before: Placement, after: Placement) -> StepKind:
    if isinstance(before, Partial):
        return "reduce_scatter" if isinstance(after, Shard) else "all_reduce"
    if isinstance(before, Shard):
        return "all_to_all" if isinstance(after, Shard) else "all_gather"
    return "slice"


def step_between(
    shape: Sequence[int], before: Layout, after: Layout, mesh: MeshShape
) -> RedistributionStep:
    """The one step between two layouts that differ along one axis."""
    return _step(tuple(shape), before, after, mesh)


def _step(
    shape: tuple[int, ...], before: Layout, after: Layout, mesh: MeshShape
) -> RedistributionStep:
    ((axis, old, new),) = (
        (axis, old, new)
        for axis, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    )
    return RedistributionStep(
        kind=_kind(old, new),
        axis=axis,
        source_dim=old.dim if isinstance(old, Shard) else None,
        target_dim=new.dim if isinstance(new, Shard) else None,
        input_shape=local_shape(shape, before, mesh),
        output_shape=local_shape(shape, after, mesh),
    )
