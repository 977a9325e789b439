"""torchtitan's routed experts as blocks that gt_autoparallel can plan and place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanExpertBlock:
    """``RoutedExperts`` of one layer; see ``gt_autoparallel.ExpertBlock``."""

    moe: MoE
    """The layer around them, which counts the tokens of each expert."""

    module: RoutedExperts
    weight_names: tuple[str, ...]
    hidden_dims: tuple[int, ...]

    def run(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        token_counts: torch.Tensor,
        weights: Sequence[torch.Tensor],
        *,
        expert_mesh: DeviceMesh | None,
        again: bool,
    ) -> torch.Tensor:
        """This rank's (B, L, D) tokens through their experts; training counts them, once."""
        dispatcher = self.module.token_dispatcher
        if expert_mesh is not None and dispatcher.ep_mesh is not expert_mesh:
            dispatcher.wire_meshes(ep_mesh=expert_mesh)
        if self.moe.training and not again:
            with torch.no_grad():
                self.moe.tokens_per_expert_E.add_(token_counts)
        result: torch.Tensor = functional_call(
            self.module,
            dict(zip(self.weight_names, weights, strict=True)),
            (tokens, scores, expert_ids, token_counts),
        )
        return result


def expert_blocks(model: nn.Module) -> dict[str, TitanExpertBlock]:
    """The expert blocks of a decoder, by the names of their modules.

    Each gets a dispatcher that can exchange tokens; which axis it exchanges over, or none, the plan
    says.
    """
    blocks: dict[str, TitanExpertBlock] = {}
    for name, moe in model.named_modules():
        if not isinstance(moe, MoE):
            continue
        routed = moe.routed_experts
        dispatcher = routed.token_dispatcher
        if not isinstance(dispatcher, BaseEPTokenDispatcher):
            routed.token_dispatcher = AllToAllTokenDispatcher(
                AllToAllTokenDispatcher.Config(
                    num_experts=dispatcher.num_experts, top_k=dispatcher.top_k
                )
            )
        names = tuple(parameter for parameter, _ in routed.named_parameters())
        blocks[f"{name}.routed_experts"] = TitanExpertBlock(
            moe=moe, module=routed, weight_names=names, hidden_dims=_hidden_dims(names)
        )
    return blocks


def _hidden_dims(weight_names: Sequence[str]) -> tuple[int, ...]:
    """Where hidden features are, by the letters with which torchtitan names dims: ``w2_EDF``."""
    dims = [name.rpartition("_")[2].find("F") for name in weight_names]
    return () if -1 in dims else tuple(dims)


@contextmanager
def uncounted_routing(model: nn.Module) -> Iterator[None]:
    """Inside, layers of experts do not count tokens: a placed block counts its own.

    Counting writes to a buffer, which no placement of values can express.
    """
    counting = [m for m in model.modules() if isinstance(m, MoE) and m.training]
    for moe in counting:
        moe.training = False  # of the layer alone, where it decides about counting only
    try:
        yield
    finally:
        for moe in counting:
            moe.training = True
