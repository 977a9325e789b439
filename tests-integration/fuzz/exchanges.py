"""The collectives inside layers, differentiable, as functional collectives with their waits.

What a tensor- or expert-parallel layer puts into a captured graph, without the rest of such a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

_functional = torch.ops._c10d_functional
NUM_RANKS = 2
"""Of every group: gloo then sums in one order, however a message is laid out."""


def all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    """(n, ...) of each rank to (2n, ...); backward reduces and scatters."""
    result: torch.Tensor = _AllGather.apply(x, group)
    return result


def reduce_scatter(x: torch.Tensor, group: str) -> torch.Tensor:
    """(2n, ...) to the rank's (n, ...) of the sum; backward gathers."""
    result: torch.Tensor = _ReduceScatter.apply(x, group)
    return result


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over ranks, and so backward."""
    result: torch.Tensor = _AllReduce.apply(x, group)
    return result


def all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> torch.Tensor:
    """Rows to their ranks; empty splits are even. Backward sends the gradients back."""
    result: torch.Tensor = _AllToAll.apply(x, list(output_splits), list(input_splits), group)
    return result


def _gather(x: torch.Tensor, group: str) -> torch.Tensor:
    result: torch.Tensor = _functional.wait_tensor(
        _functional.all_gather_into_tensor(x.contiguous(), NUM_RANKS, group)
    )
    return result


def _scatter(x: torch.Tensor, group: str) -> torch.Tensor:
    result: torch.Tensor = _functional.wait_tensor(
        _functional.reduce_scatter_tensor(x.contiguous(), "sum", NUM_RANKS, group)
    )
    return result


def _sum(x: torch.Tensor, group: str) -> torch.Tensor:
    result: torch.Tensor = _functional.wait_tensor(
        _functional.all_reduce(x.contiguous(), "sum", group)
    )
    return result


def _exchange(
    x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str
) -> torch.Tensor:
    if not output_splits:
        output_splits = input_splits = [x.shape[0] // NUM_RANKS] * NUM_RANKS
    result: torch.Tensor = _functional.wait_tensor(
        _functional.all_to_all_single(x.contiguous(), output_splits, input_splits, group)
    )
    return result


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(gradient, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (output_splits, input_splits), group
        return _exchange(x, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        output_splits, input_splits = ctx.splits
        return _exchange(gradient, input_splits, output_splits, ctx.group), None, None, None
