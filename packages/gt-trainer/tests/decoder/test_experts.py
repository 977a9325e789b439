"""UncastExperts: torchtitan's experts without its casts to bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from gt_trainer.decoder.experts import UncastExperts, replace_inner_experts

NUM_EXPERTS, DIM, HIDDEN_DIM = 4, 16, 24
COUNTS = {
    "even": [3, 3, 3, 3],
    "uneven, one idle": [7, 0, 1, 4],
    "the last idle": [5, 6, 1, 0],
}
every_count = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())


def experts(kind: type[GroupedExperts], dtype: torch.dtype) -> GroupedExperts:
    config = kind.Config(dim=DIM, hidden_dim=HIDDEN_DIM, num_experts=NUM_EXPERTS)
    made: GroupedExperts = config.build()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return made.to(dtype)


def outputs_and_gradients(
    module: GroupedExperts, counts: list[int], dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), DIM, generator=generator).to(dtype).requires_grad_()
    out = module(x, torch.tensor(counts))
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return [out, x.grad, *(p.grad for p in module.parameters())]


@every_count
def test_in_bfloat16_they_are_torchtitans_bit_for_bit(counts: list[int]) -> None:
    ours = outputs_and_gradients(
        experts(UncastExperts, torch.bfloat16), counts, dtype=torch.bfloat16
    )
    theirs = outputs_and_gradients(
        experts(GroupedExperts, torch.bfloat16), counts, dtype=torch.bfloat16
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert torch.equal(a, b)


@every_count
def test_in_float32_nothing_is_rounded_to_bfloat16(counts: list[int]) -> None:
    module = experts(UncastExperts, torch.float32)
    found = outputs_and_gradients(module, counts, dtype=torch.float32)
    expected = outputs_and_gradients(_Dense(module), counts, dtype=torch.float64)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-6 * b.norm()


class _Dense(nn.Module):
    """The definition, one expert after another, in float64."""

    def __init__(self, like: GroupedExperts) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Parameter(weight.detach().double())
            for weight in (like.w1_EFD, like.w2_EDF, like.w3_EFD)
        )

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [
                (F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
                for rows, w1, w2, w3 in zip(
                    x.split(counts.tolist()), self.w1, self.w2, self.w3, strict=True
                )
            ]
        )


def test_experts_of_a_models_own_stay_and_return_the_dtype_of_their_tokens() -> None:
    model = gpt_oss.gpt_oss_debugmodel().model_spec.model
    published = model.layers[0].moe.routed_experts.inner_experts
    assert not replace_inner_experts(model)
    kinds = {type(layer.moe.routed_experts.inner_experts) for layer in model.layers}
    (kind,) = kinds
    assert kind._owner is not GptOssGroupedExperts
    assert issubclass(kind._owner, GptOssGroupedExperts)
    found = replace(
        model.layers[0].moe.routed_experts.inner_experts, dim=DIM, hidden_dim=HIDDEN_DIM
    )
    theirs = replace(published, dim=DIM, hidden_dim=HIDDEN_DIM)
    counts, results = torch.tensor([2, 1, 0, 3, 0, 0, 0, 0]), []
    for config in (found, theirs):
        module = config.build()
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        results.append(module(torch.randn(6, DIM, generator=generator), counts))
    assert (results[0].dtype, results[1].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(results[0], results[1].float())
