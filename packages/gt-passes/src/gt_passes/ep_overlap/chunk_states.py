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

from dataclasses import dataclass, replace

import torch


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
        return replace(self, dim=dim)


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


def layout_in_view(
    layout: Layout, source: torch.Tensor, view: torch.Tensor, *, extent: int
) -> Layout | None:
    """The layout of a view of a contiguous value, read off the strides of the two.

    In ``source``, elements of the next chunked index lie ``period`` bytes apart. A dimension of the
    view holds the chunked extent where its own step divides the period and it walks the extent a
    whole number of times.

    Args:
        layout: of ``source``.
        source: the contiguous value.
        view: of it, that takes all of the chunked dimension.
        extent: that is chunked, of the whole value.

    Returns:
        None where no one dimension of ``view`` holds the extent.
    """
    period = source.stride(layout.dim) * layout.inner * source.itemsize
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        step = stride * view.itemsize
        if step == 0 or period % step:
            continue
        inner = period // step
        if size and size % (inner * extent) == 0:
            return Layout(dim=dim, outer=size // (inner * extent), inner=inner)
    return None


def describe(state: State | tuple[State, ...]) -> str:
    """A state in words, for messages."""
    match state:
        case Whole():
            return "whole"
        case Sharded(layout):
            return f"sharded along dim {layout.dim}"
        case Partial():
            return "a term of a sum"
        case Local():
            return "local to the chunk"
    return "a tuple"
