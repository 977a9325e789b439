"""Routed experts for machines without bfloat16 products.

torchtitan 0.3.0's experts cast tokens and weights to bfloat16, whatever precision the model has
(``torchtitan/models/common/moe.py``). A processor without instructions for such products makes them
many times slower than those in float32. On CPU we therefore replace the *configuration* of each
mixture's experts, which then multiply what they are given; router, dispatch and combination stay
torchtitan's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Make every mixture of a decoder's configuration compute where it runs on CPU, in place.

    torchtitan's common experts become ``UncastExperts``. Those of a model's own compute as they do,
    and return their tokens in the dtype in which they came.

    Returns:
        Whether there was a mixture of the common experts.
    """
    is_any_common = False
    for _, mixture, _, _ in model_config.traverse(RoutedExperts.Config):
        assert isinstance(mixture, RoutedExperts.Config)
        kind = mixture.inner_experts._owner
        is_common = kind is GroupedExperts
        wanted = UncastExperts if is_common else _returning_dtype(kind)
        mixture.inner_experts = derive(mixture.inner_experts, wanted.Config)
        is_any_common = is_any_common or is_common
    return is_any_common


@functools.cache
def _returning_dtype(kind: Any) -> type[GroupedExperts]:
    """Experts like ``kind``, whose result can be added to a sum in the run's precision."""

    class ReturningDtype(kind):  # type: ignore[misc]  # a class that is an argument
        """As torchtitan's, in the dtype of the tokens."""

        @dataclass(kw_only=True, slots=True)
        class Config(kind.Config):  # type: ignore[misc]  # likewise
            """As torchtitan's."""

        def forward(self, x_RD: torch.Tensor, num_tokens_E: torch.Tensor) -> torch.Tensor:
            out_RD: torch.Tensor = super().forward(x_RD, num_tokens_E)
            return out_RD.to(x_RD.dtype)

    ReturningDtype.__name__ = ReturningDtype.__qualname__ = f"{kind.__name__}ReturningDtype"
    return ReturningDtype
