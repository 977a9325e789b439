"""Runs whose every float32 is a float64, to tell a wrong result from rounding.

Two runs that compute the same in another order are as far apart as their precision lets them: in
float64 by no more than 1e-13. What differs by more there is no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.moe import GroupedExperts

__all__ = ["float64_for_float32"]


@contextmanager
def float64_for_float32() -> Iterator[None]:
    """Inside, models are built in float64, and who asks for float32 gets float64."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(GroupedExperts, "_grouped_mm", _grouped_products)
        patch.setitem(TORCH_DTYPE_MAP, "float32", torch.float64)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _grouped_products(
    experts: GroupedExperts, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """What the operator computes that knows no float64: each row times its expert's matrix.

    Args:
        experts: whose method this is.
        A: (R, K) rows, those of one expert after those of another.
        B_t: (E, K, N).
        offs: (E,) where the rows of each expert end.
    """
    row_R1 = torch.arange(A.shape[0]).unsqueeze(1)
    is_expert_RE = (row_R1 < offs) & (row_R1 >= torch.cat([offs.new_zeros(1), offs[:-1]]))
    products = [
        (A * is_expert_RE[:, number : number + 1]) @ matrix
        for number, matrix in enumerate(B_t.unbind())
    ]
    return torch.stack(products).sum(dim=0)
