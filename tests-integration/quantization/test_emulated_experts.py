"""Emulated products of experts are those of torchao's own reference, to the last bit.

torchao has a reference for each operand: scales of rows, and scales by group, which it finds in a
loop over the groups that it reads on the host. MXFP8 it emulates for one expert at a time.
"""

from __future__ import annotations

import itertools

import pytest
import torch

torchao = pytest.importorskip(
    "torchao", reason="torchao is not installed; `make test` runs this folder with it"
)

from torchao.prototype.moe_training import utils  # noqa: E402
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm  # noqa: E402
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402

from gt_trainer.quantization.emulated_experts import (  # noqa: E402
    EmulatedFloat8Experts,
    EmulatedMXFP8Experts,
)

COUNTS = [37, 0, 27]  # one idle, none a multiple of a block
DIM, HIDDEN = 64, 96
FLOAT8 = torch.float8_e4m3fn


def experts_of(kind: type, dtype: torch.dtype) -> tuple[GroupedExperts, torch.Tensor]:
    torch.manual_seed(3)
    config = kind.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=len(COUNTS))
    experts = config.build().to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randn(sum(COUNTS), DIM).mul(torch.rand(sum(COUNTS), 1).exp()).to(dtype)
    return experts, tokens.requires_grad_()


def dequantized(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return data.float() / scales


def test_float8_operands_are_those_of_torchao_s_reference() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 32).requires_grad_(), torch.randn(3, 32, 48).requires_grad_()
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    experts, _ = experts_of(EmulatedFloat8Experts, torch.float32)
    column_major = b.transpose(-2, -1).contiguous().transpose(-2, -1)
    product = experts._grouped_mm(A=a, B_t=column_major, offs=ends)
    gradient = torch.randn(64, 48)
    grad_a, grad_b = torch.autograd.grad(product, (a, b), gradient)

    def rows(x: torch.Tensor, dim: int) -> torch.Tensor:
        scales = utils.tensor_to_scale(
            x,
            FLOAT8,
            scaling_granularity=utils.ScalingGranularity.AXISWISE,
            axiswise_dim=dim,
            round_scales_to_power_of_2=True,
        )
        return dequantized(utils.to_fp8_saturated(x.float() * scales, FLOAT8), scales)

    starts = [0, *ends.tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        mine = slice(start, end)
        with torch.no_grad():
            assert torch.equal(product[mine], rows(a[mine], -1) @ rows(b[expert], 0))
            assert torch.equal(
                grad_a[mine], rows(gradient[mine], -1) @ rows(b[expert].t().contiguous(), 0)
            )
            if start == end:
                assert not grad_b[expert].any()
                continue
            # One scale for each column of a group.
            columns_a, columns_gradient = (
                dequantized(
                    *utils.torch_to_float8_per_group_colwise(
                        x[mine],
                        torch.tensor([end - start]),
                        FLOAT8,
                        round_scales_to_power_of_2=True,
                    )
                )
                for x in (a, gradient)
            )
            torch.testing.assert_close(
                grad_b[expert], (columns_gradient.t() @ columns_a).t(), rtol=1e-6, atol=1e-5
            )


def test_mxfp8_of_unpadded_groups_is_that_of_each_expert_alone() -> None:
    experts, tokens = experts_of(EmulatedMXFP8Experts, torch.bfloat16)
    output = experts(tokens, torch.tensor(COUNTS))
    gradient = torch.randn_like(output)
    names = ["tokens", *(name for name, _ in experts.named_parameters())]
    found = torch.autograd.grad(output, [tokens, *experts.parameters()], gradient)
    by_name = dict(zip(names, found, strict=True))

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _to_mxfp8_then_scaled_mm(
            x,
            weight,
            kernel_preference=KernelPreference.EMULATED,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
        )

    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    for expert, (count, end) in enumerate(zip(COUNTS, ends, strict=True)):
        if not count:
            assert not any(by_name[name][expert].any() for name in names[1:])
            continue
        mine = slice(end - count, end)
        padding = torch.zeros(-count % 32, DIM, dtype=torch.bfloat16)
        x = torch.cat([tokens[mine].detach(), padding]).requires_grad_()
        weights = [p[expert].detach().requires_grad_() for p in experts.parameters()]
        w1, w2, w3 = weights
        alone = multiply(torch.nn.functional.silu(multiply(x, w1)) * multiply(x, w3), w2)[:count]
        assert torch.equal(alone, output[mine])
        expected = torch.autograd.grad(alone, [x, *weights], gradient[mine])
        assert torch.equal(expected[0][:count], by_name["tokens"][mine])
        for name, wanted in zip(names[1:], expected[1:], strict=True):
            assert torch.equal(wanted, by_name[name][expert])
