"""How a tensor gets from one layout to another, in steps that all of the package shares.

One list of steps is priced by the planner, counted by the prediction and run by the placed model,
so that what is predicted is what happens. Each step works along one mesh axis. Where two axes
shard one dim, the later axis cuts the pieces of the earlier one, so the later one must be undone
first and made last; a way that this forbids goes through ``Replicate()``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gt_autoparallel.graph.layouts import Layout, MeshShape, fits, short_text
from gt_autoparallel.graph.redistribution_ways import (
    CodedLayout,
    StepKind,
    can_become,
    coded,
    divisors,
    kind_of,
    way_between,
)


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
        """Elements on one rank: the larger of what goes in and what comes out."""
        return max(math.prod(self.input_shape), math.prod(self.output_shape))


def can_redistribute(source: Layout, target: Layout) -> bool:
    """Whether there is a way: sums stay unfinished only where they were so before."""
    return can_become(coded(source), coded(target))


def redistribution_steps(
    shape: Sequence[int], source: Layout, target: Layout, mesh: MeshShape
) -> tuple[RedistributionStep, ...]:
    """The cheapest order of single-axis steps from ``source`` to ``target``.

    Each axis is only ever in its placement before, its placement after, or replicated, and every
    layout on the way cuts the tensor evenly. The cheapest order is the one in which a rank sends
    the fewest elements; among equals the one that sends fewer along earlier axes, which usually
    have the slower links; then the one with fewer steps. Axes of size 1 move nothing and have no
    step.

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
    way = way_between(divisors(shape, mesh), coded(source), coded(target), mesh.sizes)
    return tuple(
        step_between(shape, before, after, mesh) for before, after in itertools.pairwise(way)
    )


def step_between(
    shape: tuple[int, ...], before: CodedLayout, after: CodedLayout, mesh: MeshShape
) -> RedistributionStep:
    """The one step between two layouts that differ along one axis, and cut ``shape`` evenly."""
    ((axis, old, new),) = (
        (axis, old, new)
        for axis, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    )
    return RedistributionStep(
        kind=kind_of(old, new),
        axis=axis,
        source_dim=old if old >= 0 else None,
        target_dim=new if new >= 0 else None,
        input_shape=_local_shape(shape, before, mesh),
        output_shape=_local_shape(shape, after, mesh),
    )


def _local_shape(shape: tuple[int, ...], layout: CodedLayout, mesh: MeshShape) -> tuple[int, ...]:
    local = list(shape)
    for dim, size in zip(layout, mesh.sizes, strict=True):
        if dim >= 0:
            local[dim] //= size
    return tuple(local)
