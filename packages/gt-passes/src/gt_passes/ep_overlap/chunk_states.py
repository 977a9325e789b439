"""What a value is while its region runs chunk by chunk, and how its parts become whole again.

A region of a step is run once for each chunk of the batch or of the sequence. Every value in it is
then one of four things, worked out operator by operator (``gt_passes.ep_overlap.chunk_rules``), in
the manner of sharding propagation in GSPMD (arXiv 2105.04663), with chunks in time where those have
devices in space:

- ``Whole``: the same for all chunks; there is one.
- ``Sharded``: each chunk has its own part of one dimension; ``cat`` makes it whole.
- ``Partial``: each chunk has a term; the sum makes it whole. Gradients of parameters are partial.
- ``Local``: each chunk has its own, as sort orders and split sizes have it, and no join is right.

Because a wrong join is silent, ``Local`` is what remains wherever nothing else is proven, and a
``Local`` that somebody outside of the region reads is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layout", "Local", "Partial", "Sharded", "State", "Whole", "layout_of", "relayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the chunked extent stands in a shape: dimension ``dim`` is outer x extent x inner.

    Tokens flattened from (batch, sequence) have outer = batch when the sequence is chunked, and
    inner = sequence when the batch is.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def factor(self) -> int:
        """Size of the dimension for an extent of one."""
        return self.outer * self.inner

    def moved(self, dim: int) -> Layout:
        """The same in another dimension."""
        return Layout(dim=dim, outer=self.outer, inner=self.inner)


@dataclass(frozen=True, slots=True)
class Whole:
    """The same value for every chunk."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """Each chunk has its own part along one dimension."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class Partial:
    """Each chunk has a term of a sum."""


@dataclass(frozen=True, slots=True)
class Local:
    """Each chunk has its own value."""

    layout: Layout | None = None
    """Where the extent stands in its shape, if that is known."""

    permuted: bool = True
    """False where the contract of expert-parallel regions says that it stands in token order."""


State = Whole | Sharded | Partial | Local


def layout_of(state: State) -> Layout | None:
    """Where the chunked extent stands in the shape of a value, if it does and that is known."""
    return state.layout if isinstance(state, (Sharded, Local)) else None


def relayout(
    layout: Layout, before: Sequence[int], after: Sequence[int], *, extent: int
) -> Layout | None:
    """The layout of a contiguous value under another shape of as many elements.

    Args:
        layout: under the shape ``before``.
        before: the shape.
        after: the other shape.
        extent: that is chunked, of the whole value.

    Returns:
        None where no one dimension of ``after`` holds the extent.
    """
    leading = math.prod(before[: layout.dim]) * layout.outer
    prefix = 1
    for dim, size in enumerate(after):
        if leading % prefix:
            return None
        outer = leading // prefix
        if size and size % (outer * extent) == 0:
            return Layout(dim=dim, outer=outer, inner=size // (outer * extent))
        prefix *= size
    return None
