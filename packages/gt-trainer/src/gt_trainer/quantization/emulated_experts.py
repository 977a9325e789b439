"""Experts whose grouped products are rounded to 8 bits, by operators that every device has.

Row-wise float8 multiplies by kernels alone in torchao 0.18 (``prototype/moe_training``), so that
its products are written here, of torchao's scales and casts; MXFP8 has an emulation there. Both
kernels want the tokens of an expert padded to a multiple. Row-wise scales do not see the padding,
and blocks of MXFP8 do: they begin anew with each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gt_trainer.decoder.experts import UncastExperts
from gt_trainer.quantization._torchao_internals import (
    KernelPreference,
    ScalingGranularity,
    amax_to_scale,
    tensor_to_scale,
    to_fp8_saturated,
    to_mxfp8_then_scaled_grouped_mm,
)

_FLOAT8 = torch.float8_e4m3fn
_MX_BLOCK = 32


class EmulatedFloat8Experts(UncastExperts):
    """Experts that multiply as ``Float8GroupedExpertsConverter``'s do, on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(UncastExperts.Config):
        """That of the experts that it stands for."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        product: Tensor = _Float8GroupedProduct.apply(A, B_t, offs)
        return product


class EmulatedMXFP8Experts(UncastExperts):
    """Experts that multiply as ``MXFP8GroupedExpertsConverter``'s do, on any device."""

    @dataclass(kw_only=True, slots=True)
    class Config(UncastExperts.Config):
        """That of the experts that it stands for."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """As the base class's, on tokens padded so that each expert's begin a block of 32.

        Args:
            x_RD: (R, D) tokens, those of one expert after those of another.
            num_tokens_per_expert_E: (E,) integers whose sum is R.

        Returns:
            (R, D), of the dtype of ``x_RD``.
        """
        counts_E = num_tokens_per_expert_E
        padded_E = (counts_E + (_MX_BLOCK - 1)) // _MX_BLOCK * _MX_BLOCK
        shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
        row_R = torch.arange(x_RD.shape[0], device=x_RD.device)
        expert_R = _group_of(row_R, counts_E.cumsum(0)).clamp(max=counts_E.shape[0] - 1)
        row_R = row_R + shift_E[expert_R]
        num_blocks = (x_RD.shape[0] + _MX_BLOCK - 1) // _MX_BLOCK + counts_E.shape[0]
        x_PD = x_RD.new_zeros(num_blocks * _MX_BLOCK, x_RD.shape[1]).index_copy(0, row_R, x_RD)
        return super().forward(x_PD, padded_E).index_select(0, row_R)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        product: Tensor = to_mxfp8_then_scaled_grouped_mm(
            A, B_t, offs, kernel_preference=KernelPreference.EMULATED
        )
        return product.to(A.dtype)


class _Float8GroupedProduct(torch.autograd.Function):
    """A (R, K), rows by group, times B (E, K, N) gives (R, N); operands of each product rounded."""

    @staticmethod
    def forward(ctx: Any, A_RK: Tensor, B_EKN: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(A_RK, B_EKN, ends_E)
        return torch._grouped_mm(_rounded(A_RK, dim=-1), _rounded(B_EKN, dim=-2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dC_RN,) = grads
        A_RK, B_EKN, ends_E = ctx.saved_tensors
        B_ENK = _rounded(B_EKN, dim=-1).transpose(-2, -1)
        dA_RK = torch._grouped_mm(_rounded(dC_RN, dim=-1), B_ENK, offs=ends_E)
        group_R = _group_of(torch.arange(A_RK.shape[0], device=A_RK.device), ends_E)
        num_groups = ends_E.shape[0] + 1  # the last of what is in no group
        dB_ENK = torch._grouped_mm(
            _rounded_by_group(dC_RN, group_R, num_groups).t(),
            _rounded_by_group(A_RK, group_R, num_groups),
            offs=ends_E,
        )
        return dA_RK, dB_ENK.transpose(-2, -1), None


def _group_of(row_R: Tensor, ends_E: Tensor) -> Tensor:
    """Index of the first group that ends behind a row; E behind all."""
    return torch.searchsorted(ends_E.to(row_R.dtype), row_R, right=True)


def _rounded(x: Tensor, *, dim: int) -> Tensor:
    """What a float8 operand stands for, with one scale along a dim, in the dtype of ``x``."""
    scale = tensor_to_scale(
        x,
        _FLOAT8,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )
    return _scaled_and_back(x, scale)


def _rounded_by_group(x_RD: Tensor, group_R: Tensor, num_groups: int) -> Tensor:
    """Likewise with one scale for each column of each group of rows."""
    index_RD = group_R.unsqueeze(-1).expand(-1, x_RD.shape[1])
    amax_GD = x_RD.new_zeros(num_groups, x_RD.shape[1]).scatter_reduce(
        0, index_RD, x_RD.abs(), "amax"
    )
    scale_GD = amax_to_scale(amax_GD, _FLOAT8, round_scales_to_power_of_2=True)
    return _scaled_and_back(x_RD, scale_GD.index_select(0, group_R))


def _scaled_and_back(x: Tensor, scale: Tensor) -> Tensor:
    quantized = to_fp8_saturated(x.to(torch.float32) * scale, _FLOAT8)
    rounded: Tensor = (quantized.to(torch.float32) / scale).to(x.dtype)
    return rounded
