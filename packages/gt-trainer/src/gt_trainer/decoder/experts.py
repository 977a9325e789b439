"""Routed experts for machines without bfloat16 products.

torchtitan 0.3.0's experts cast tokens and weights to bfloat16, whatever precision the model has
(``torchtitan/models/common/moe.py``). A processor without instructions for such products makes them
many times slower than those in float32. On CPU we therefore replace the *configuration* of each
mixture's experts, which then multiply what they are given; router, dispatch and combination stay
torchtitan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

if TYPE_CHECKING:
    from torchtitan.protocols.model import BaseModel


class UncastExperts(GroupedExperts):
    """Experts that compute in the dtype of their tokens and weights: the run's mixed precision.

    In a bfloat16 run they are torchtitan's, operator for operator.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """That of torchtitan's experts."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Send each token through its expert.

        Args:
            x_RD: (R, D) tokens, those of one expert after those of another.
            num_tokens_per_expert_E: (E,) integers, the tokens of each expert on this rank.

        Returns:
            (R, D), of the dtype of ``x_RD``.
        """
        w1_EDF, w2_EFD, w3_EDF = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).transpose(-2, -1)
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        h_RF = F.silu(self._grouped_mm(A=x_RD, B_t=w1_EDF, offs=ends_E))
        h_RF = h_RF * self._grouped_mm(A=x_RD, B_t=w3_EDF, offs=ends_E)
        return self._grouped_mm(A=h_RF, B_t=w2_EFD, offs=ends_E)


def replace_inner_experts(model_config: BaseModel.Config) -> bool:
    """Make every mixture of a decoder's configuration use ``UncastExperts``, in place.

    Returns:
        Whether the model has experts.
    """
    mixtures = list(model_config.traverse(RoutedExperts.Config))
    for _, mixture, _, _ in mixtures:
        assert isinstance(mixture, RoutedExperts.Config)
        mixture.inner_experts = derive(mixture.inner_experts, UncastExperts.Config)
    return bool(mixtures)
