"""Which layouts a tensor goes through from one layout to another, found on plain numbers.

A planner asks for millions of ways, so layouts are *coded* here: for each mesh axis the dim that
it shards, or one of two negative numbers. A way depends on the sizes of the mesh, on which of their
products divide which dim, and on nothing else of a tensor.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.graph.layouts import Layout, MeshShape

StepKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"]
"""all_gather: S(d) -> R. reduce_scatter: P -> S(d). all_reduce: P -> R. all_to_all: S(a) -> S(b).
slice: R -> S(d), local: no communication."""

CodedLayout = tuple[int, ...]
"""For each mesh axis the dim that it shards, ``REPLICATED`` or ``PARTIAL``."""

REPLICATED, PARTIAL = -1, -2

Divisors = tuple[frozenset[int], ...]
"""For each dim, which products of sizes of mesh axes divide it: all that the way depends on."""


@lru_cache(maxsize=1 << 16)
def coded(layout: Layout) -> CodedLayout:
    """A layout in numbers.

    Raises:
        PlacementInputError: it is partial by another operation than a sum.
    """
    return tuple(map(_code, layout))


def _code(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return placement.dim
    if isinstance(placement, Partial):
        if placement.reduce_op != "sum":
            raise PlacementInputError(f"placement {placement!r}; allowed: Partial(sum)")
        return PARTIAL
    assert isinstance(placement, Replicate), "a layout has no other placements"
    return REPLICATED


@lru_cache(maxsize=1 << 12)
def divisors(shape: tuple[int, ...], mesh: MeshShape) -> Divisors:
    """What of a shape decides which layouts fit it."""
    products = {
        math.prod(chosen)
        for count in range(1, mesh.num_axes + 1)
        for chosen in itertools.combinations(mesh.sizes, count)
    }
    return tuple(frozenset(p for p in products if size % p == 0) for size in shape)


def can_become(source: CodedLayout, target: CodedLayout) -> bool:
    """Whether there is a way: sums stay unfinished only where they were so before."""
    return all(
        before == PARTIAL or after != PARTIAL for before, after in zip(source, target, strict=True)
    )


def kind_of(before: int, after: int) -> StepKind:
    """What brings one axis from one code to another, different one."""
    if before == PARTIAL:
        return "all_reduce" if after == REPLICATED else "reduce_scatter"
    if before == REPLICATED:
        return "slice"
    return "all_gather" if after == REPLICATED else "all_to_all"


def way_between(
    dims: Divisors, source: CodedLayout, target: CodedLayout, sizes: tuple[int, ...]
) -> tuple[CodedLayout, ...]:
    """The layouts from ``source`` to ``target``, both included, that one step each connects.

    Each axis is only ever in its placement before, its placement after, or replicated, and every
    layout on the way cuts the tensor evenly. Axes of one rank count as replicated. ``target`` is
    partial only where ``source`` is.
    """
    if 1 in sizes:
        source, target = (
            tuple(REPLICATED if size == 1 else p for p, size in zip(layout, sizes, strict=True))
            for layout in (source, target)
        )
    direct = _direct_order(source, target)
    if direct is not None:
        return tuple(direct)
    # The way depends on the dims that are cut, not on their places: many pairs are one problem.
    cut = list(dict.fromkeys(p for p in (*source, *target) if p >= 0))
    place = {dim: number for number, dim in enumerate(cut)}
    place[REPLICATED], place[PARTIAL] = REPLICATED, PARTIAL
    way = _way_of_cut_dims(
        tuple(dims[dim] for dim in cut),
        tuple(place[p] for p in source),
        tuple(place[p] for p in target),
        sizes,
    )
    back = [*cut, PARTIAL, REPLICATED]  # so that -1 and -2 stay what they are
    return tuple(tuple(back[p] for p in layout) for layout in way)


_DIRECT_RANK = {"slice": 0, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 3, "all_gather": 4}


def _direct_order(source: CodedLayout, target: CodedLayout) -> list[CodedLayout] | None:
    """Layouts on the way if no dim is cut along two axes anywhere: no step hinders another.

    What shrinks the tensor goes first, what lets it grow last; among growing ones the earlier axis
    is first, among shrinking ones last, so that the earlier axis carries less.
    """
    axis_of_dim: dict[int, int] = {}
    for layout in (source, target):
        for axis, placement in enumerate(layout):
            if placement >= 0 and axis_of_dim.setdefault(placement, axis) != axis:
                return None
    changes = []
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        if before != after:
            kind = kind_of(before, after)
            order = -axis if kind in ("slice", "reduce_scatter") else axis
            changes.append((_DIRECT_RANK[kind], order, axis))
    layouts = [source]
    for _, _, axis in sorted(changes):
        layouts.append(_replaced(layouts[-1], axis, target[axis]))
    return layouts


@lru_cache(maxsize=1 << 16)
def _way_of_cut_dims(
    dims: Divisors, source: CodedLayout, target: CodedLayout, sizes: tuple[int, ...]
) -> tuple[CodedLayout, ...]:
    """Dijkstra's algorithm over the layouts that the axes' allowed placements combine to."""
    choices = [
        tuple(dict.fromkeys((before, after, REPLICATED)))
        for before, after in zip(source, target, strict=True)
    ]
    start = (0,) * (len(sizes) + 2)
    ticket = itertools.count()
    queue: list[tuple[tuple[int, ...], int, CodedLayout]] = [(start, next(ticket), source)]
    best: dict[CodedLayout, tuple[int, ...]] = {source: start}
    came_from: dict[CodedLayout, CodedLayout] = {}
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == target:
            way = [layout]
            while way[-1] != source:
                way.append(came_from[way[-1]])
            return tuple(way[::-1])
        if cost > best[layout]:
            continue
        for axis, neighbor in _neighbors(dims, layout, choices, sizes):
            total = _added(cost, axis, layout, neighbor, sizes)
            if neighbor not in best or total < best[neighbor]:
                best[neighbor] = total
                came_from[neighbor] = layout
                heapq.heappush(queue, (total, next(ticket), neighbor))
    raise AssertionError("gathering everything and slicing it again is always a way")


def _neighbors(
    dims: Divisors,
    layout: CodedLayout,
    choices: Sequence[tuple[int, ...]],
    sizes: tuple[int, ...],
) -> Iterator[tuple[int, CodedLayout]]:
    for axis, placements in enumerate(choices):
        here, later = layout[axis], layout[axis + 1 :]
        if here >= 0 and here in later:  # a later axis cuts these pieces: it must be undone first
            continue
        for placement in placements:
            if placement in (here, PARTIAL) or (placement >= 0 and placement in later):
                continue
            neighbor = _replaced(layout, axis, placement)
            if placement < 0 or _is_even(dims[placement], neighbor, placement, sizes):
                yield axis, neighbor


def _is_even(
    divides: frozenset[int], layout: CodedLayout, dim: int, sizes: tuple[int, ...]
) -> bool:
    """Whether ``layout`` cuts one dim evenly; ``divides`` has the numbers that divide it."""
    return math.prod(size for p, size in zip(layout, sizes, strict=True) if p == dim) in divides


def _added(
    cost: tuple[int, ...],
    axis: int,
    before: CodedLayout,
    after: CodedLayout,
    sizes: tuple[int, ...],
) -> tuple[int, ...]:
    """(elements sent, those along axis 0, along axis 1, ..., steps), with those of one more step.

    Elements are those of a tensor that every layout cuts evenly: only their proportions matter.
    """
    pieces = min(
        math.prod(size for p, size in zip(layout, sizes, strict=True) if p >= 0)
        for layout in (before, after)
    )
    rounds = {"slice": 0, "all_reduce": 2}.get(kind_of(before[axis], after[axis]), 1)
    sent = rounds * (math.prod(sizes) ** 2 // pieces // sizes[axis]) * (sizes[axis] - 1)
    total = [cost[0] + sent, *cost[1:-1], cost[-1] + 1]
    total[1 + axis] += sent
    return tuple(total)


def _replaced(layout: CodedLayout, axis: int, placement: int) -> CodedLayout:
    return (*layout[:axis], placement, *layout[axis + 1 :])
