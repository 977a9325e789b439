"""Singular values and eigenvalues without vectors, computed by the kernels of eager execution.

PyTorch computes the vectors too, by another kernel, for a tensor that requires a gradient and for
one that is traced. Last bits of the values differ between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gt_trace._torch_internals import OpOverload

VALUES_OF = frozenset(
    {
        *(torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.norm),
        *(torch.linalg.matrix_norm, torch.linalg.matrix_rank, torch.nuclear_norm),
        *(torch.norm, torch.Tensor.norm, torch.svd, torch.Tensor.svd),
    }
)
"""Functions that compute singular values or eigenvalues, and need no vectors."""

_without_vectors = False


def computes_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether eager execution computes values only in a call of a torch function."""
    if func not in VALUES_OF:
        return False
    operand = args[0] if args else next(iter(kwargs.values()), None)
    if type(operand) is torch.Tensor or not isinstance(operand, torch.Tensor):
        return False  # of a transform of torch.func, which PyTorch treats as a traced one eagerly
    if operand.requires_grad and torch.is_grad_enabled():
        return False
    is_svd = func in (torch.svd, torch.Tensor.svd)
    return not is_svd or not (args[2] if len(args) > 2 else kwargs.get("compute_uv", True))


@contextmanager
def without_vectors() -> Iterator[None]:
    """Inside, decompositions are recorded as those that compute values only."""
    global _without_vectors
    _without_vectors = True
    try:
        yield
    finally:
        _without_vectors = False


def _svd(matrix: torch.Tensor, full: bool = False, vectors: bool = True, **options: Any) -> Any:
    if not (vectors and _without_vectors):
        return NotImplemented
    return torch.ops.aten._linalg_svd.default(matrix, full, False, **options)


def _eigh(matrix: torch.Tensor, triangle: str = "L", vectors: bool = True) -> Any:
    if not (vectors and _without_vectors):
        return NotImplemented
    return torch.ops.aten._linalg_eigh.default(matrix, triangle, False)


WITHOUT_VECTORS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._linalg_svd.default: _svd,
    torch.ops.aten._linalg_eigh.default: _eigh,
}
"""A decomposition table for traces."""
