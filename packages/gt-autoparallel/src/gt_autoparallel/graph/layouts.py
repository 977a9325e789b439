"""Meshes and layouts as plain values: what the planner computes with, without process groups.

A layout is what DTensor calls placements: one ``Replicate()``, ``Shard(dim)`` or
``Partial("sum")`` for each mesh axis, applied from the first axis to the last, so that a dim that
two axes shard is cut by the first one into the larger pieces. Planned shards are always even: a
layout fits a tensor only if each cut divides the dim, so that every rank's shapes are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.errors import PlacementInputError

Layout = tuple[Placement, ...]
"""One placement for each mesh axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Names and sizes of a mesh's axes: all of a mesh that a plan depends on."""

    names: tuple[str, ...]
    """Names of the axes, all different."""

    sizes: tuple[int, ...]
    """Number of ranks along each axis, at least 1."""

    strides: tuple[int, ...] = ()
    """From a rank to the next along each axis, in global ranks; by default ranks fill the mesh row
    by row, the last axis first."""

    def __post_init__(self) -> None:
        problems = []
        if not _all_of(self.names, str):
            problems.append(f"names are {self.names!r}; allowed: a tuple of strings")
        if not _all_of(self.sizes, int) or any(size < 1 for size in self.sizes):
            problems.append(f"sizes are {self.sizes!r}; allowed: a tuple of integers of at least 1")
        if not problems:
            if not self.names or len(self.names) != len(self.sizes):
                problems.append(
                    f"{len(self.names)} names and {len(self.sizes)} sizes; one size a name"
                )
            if len(set(self.names)) != len(self.names):
                problems.append(f"names are {self.names!r}; each must differ")
        if not _all_of(self.strides, int) or len(self.strides) not in (0, len(self.sizes)):
            problems.append(f"strides are {self.strides!r}; allowed: one integer a size, or none")
        if problems:
            raise PlacementInputError("mesh: " + "; ".join(problems))
        if not self.strides:
            strides = (math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))
            object.__setattr__(self, "strides", tuple(strides))

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshShape:
        """The names and sizes of ``mesh``, and where rank 0's neighbors on it are.

        Raises:
            PlacementInputError: its axes have no names.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise PlacementInputError(
                "mesh: its axes have no names; make it with init_device_mesh(mesh_dim_names=...)"
            )
        sizes = tuple(int(size) for size in mesh.shape)
        strides = []
        for axis, size in enumerate(sizes):
            line = mesh.mesh.movedim(axis, -1).reshape(-1, size)[0].tolist()
            strides.append(line[1] - line[0] if size > 1 else math.prod(sizes[axis + 1 :]))
        return cls(names=tuple(names), sizes=sizes, strides=tuple(strides))

    def __str__(self) -> str:
        return " x ".join(
            f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True)
        )

    @property
    def num_axes(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all."""
        return math.prod(self.sizes)

    def ranks_of_axis(self, axis: int) -> tuple[int, ...]:
        """The global ranks of rank 0's group along ``axis``."""
        return self.ranks_of_axes((axis,))

    def ranks_of_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The global ranks of rank 0's group along several axes together, the last one fastest."""
        ranks = [0]
        for axis in axes:
            along = range(self.sizes[axis])
            ranks = [rank + self.strides[axis] * number for rank in ranks for number in along]
        return tuple(ranks)


def _all_of(values: object, kind: type) -> bool:
    """Whether it is a tuple of just that kind: a list has no hash, and a bool is no int here."""
    return isinstance(values, tuple) and all(type(value) is kind for value in values)


def replicated(mesh: MeshShape) -> Layout:
    """The layout of a tensor that every rank holds whole."""
    return (Replicate(),) * mesh.num_axes


def shard_counts(num_dims: int, layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """Into how many pieces ``layout`` cuts each dim of a tensor of ``num_dims`` dims."""
    counts = [1] * num_dims
    for placement, size in zip(layout, mesh.sizes, strict=True):
        if isinstance(placement, Shard):
            counts[placement.dim] *= size
    return tuple(counts)


def fits(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> bool:
    """Whether every cut of ``layout`` divides its dim of a tensor of global ``shape``."""
    if any(isinstance(p, Shard) and not 0 <= p.dim < len(shape) for p in layout):
        return False
    counts = shard_counts(len(shape), layout, mesh)
    return all(size % count == 0 for size, count in zip(shape, counts, strict=True))


def local_shape(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """The shape of each rank's shard of a tensor of global ``shape``.

    Raises:
        ValueError: the layout does not fit the shape.
    """
    return _local_shape(tuple(shape), layout, mesh)


@lru_cache(maxsize=1 << 16)
def _local_shape(shape: tuple[int, ...], layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    if not fits(shape, layout, mesh):
        raise ValueError(
            f"layout {short_text(layout)} does not cut shape {tuple(shape)!r} evenly on mesh "
            f"{dict(zip(mesh.names, mesh.sizes, strict=True))!r}"
        )
    counts = shard_counts(len(shape), layout, mesh)
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def num_local_elements(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> int:
    """Number of elements that each rank holds."""
    return math.prod(local_shape(shape, layout, mesh))


def short_text(layout: Layout) -> str:
    """The layout in the field's short form: ``R``, ``S(0)``, ``P(sum)``, separated by spaces."""
    return " ".join(_short(placement) for placement in layout)


def _short(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R"
