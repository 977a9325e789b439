"""Sizes and bytes of shards, worked out anew for the audit."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.layouts import Layout
from gt_autoparallel.graph.placement_graph import TensorSpec


def shard_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Shape of each rank's piece of a tensor that the layout cuts evenly."""
    result = list(shape)
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] //= size
    return tuple(result)


def shard_bytes(spec: TensorSpec, layout: Layout, sizes: Sequence[int]) -> int:
    """Bytes of each rank's piece."""
    return prod(shard_shape(spec.shape, layout, sizes)) * spec.dtype.itemsize


def layout_problem(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> str | None:
    """Why a tensor of this shape cannot have this layout; None if it can."""
    if len(layout) != len(sizes):
        return f"{len(layout)} placements for {len(sizes)} mesh axes"
    left = list(shape)
    for placement, size in zip(layout, sizes, strict=True):
        problem = _placement_problem(left, placement, size)
        if problem is not None:
            return f"{problem} of shape {tuple(shape)}"
        if isinstance(placement, Shard):
            left[placement.dim] //= size
    return None


def _placement_problem(left: Sequence[int], placement: Placement, size: int) -> str | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Partial):
        return None if placement.reduce_op == "sum" else f"{placement!r}"
    if not isinstance(placement, Shard) or not 0 <= placement.dim < len(left):
        return f"{placement!r}"
    if left[placement.dim] % size:
        return f"an uneven cut by {size} of dim {placement.dim}"
    return None
