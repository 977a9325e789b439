"""Tensors cut in chunks along one dimension, and chunks joined again.

Cut and join are autograd functions of their own, so that their backwards are one concatenation and
one cut, annotated as what they are.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gt_config.node_keys import ChunkAnnotation
from gt_trace.annotate import annotate


def split_tensor(
    whole: torch.Tensor, dim: int, num_chunks: int, boundary: ChunkAnnotation
) -> Sequence[torch.Tensor]:
    """Equal parts of what this rank holds, along one dimension.

    Args:
        whole: of an extent that divides; a DTensor of shards and replicas gives DTensors.
        dim: tensor dimension.
        num_chunks: how many parts.
        boundary: what the nodes of the cut are annotated as.
    """
    if not isinstance(whole, DTensor):
        chunks: tuple[torch.Tensor, ...] = _Split.apply(whole, dim, num_chunks, boundary)
        return chunks
    with annotate(boundary):
        locals_ = _Split.apply(whole.to_local(), dim, num_chunks, boundary)
        size = whole.shape[dim] // num_chunks
        return [_placed_like(whole, local, dim, size) for local in locals_]


def wrote_to_a_part(error: RuntimeError) -> bool:
    """Whether autograd refused a write to what ``split_tensor`` cut."""
    text = str(error)
    return f"of {_Split.__name__}" in text and "is a view and is being modified inplace" in text


def join_tensors(
    chunks: Sequence[torch.Tensor], dim: int, boundary: ChunkAnnotation
) -> torch.Tensor:
    """Chunks concatenated along one dimension of what this rank holds; see ``split_tensor``."""
    first = chunks[0]
    if not isinstance(first, DTensor):
        whole: torch.Tensor = _Join.apply(dim, boundary, *chunks)
        return whole
    with annotate(boundary):
        locals_ = [chunk.to_local() for chunk in chunks if isinstance(chunk, DTensor)]
        local = _Join.apply(dim, boundary, *locals_)
        return _placed_like(first, local, dim, first.shape[dim] * len(chunks))


def _cut(whole: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Parts that are as contiguous as the whole: forwards may take views that need it."""
    starts = itertools.accumulate(sizes, initial=0)
    parts = [whole.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
    return tuple(part.contiguous() if whole.is_contiguous() else part for part in parts)


def _placed_like(like: DTensor, local: torch.Tensor, dim: int, size: int) -> DTensor:
    """What ``local`` is this rank's part of: of the shape of ``like``, but for one dimension."""
    shape = torch.Size((*like.shape[:dim], size, *like.shape[dim + 1 :]))
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=tuple(strides)[::-1],
    )


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, dim: int, num_chunks: int, boundary: ChunkAnnotation
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        length = whole.shape[dim] // num_chunks
        with annotate(boundary):
            return _cut(whole, dim, [length] * num_chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.cat(gradients, ctx.dim), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dim: int, boundary: ChunkAnnotation, *chunks: torch.Tensor
    ) -> torch.Tensor:
        ctx.dim = dim
        ctx.sizes = [chunk.shape[dim] for chunk in chunks]
        with annotate(boundary):
            return torch.cat(chunks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *_cut(gradient, ctx.dim, ctx.sizes))
