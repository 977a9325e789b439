"""Routers that send tokens where a record says, and write the record. Workers import this by name.

A model in chunks sums in another order, so where two experts score almost alike, a token may go to
the other one. That says nothing about chunks and changes everything after it. Here one model's
choice is recorded, and the others follow it; the weights of the chosen experts are still computed
from the scores of each. A record can be written by hand too, for loads that data seldom brings.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import TokenChoiceTopKRouter

__all__ = ["BUFFER", "Load", "follow_record", "tokens_of", "write_record"]

BUFFER = "chosen_BLE"
"""Of a router: 1 where a token goes to an expert, else 0."""

Load = Literal["as recorded", "uneven", "an expert without tokens", "a rank without tokens"]


def follow_record(
    model: nn.Module, *, batch_size: int, seq_len: int, num_chunks: int = 1, records: bool = False
) -> Callable[[bool], None]:
    """Let all routers of a model choose the experts of their records; for good.

    Args:
        model: parallelized, without tensor parallelism.
        batch_size: samples of a rank.
        seq_len: tokens of a sample.
        num_chunks: into how many chunks the eager producer cuts what a router sees.
        records: whether the routers write the record first, with what they would have chosen. Only
            for models that run eagerly, which look at the switch in each pass.

    Returns:
        A switch for writing the records.
    """
    writes = [records]
    for module in model.modules():
        if isinstance(module, TokenChoiceTopKRouter):
            chosen = torch.zeros(batch_size, seq_len, module.num_experts)
            module.register_buffer(BUFFER, chosen, persistent=False)
            forward = _routed_forward(module, num_chunks, writes)
            object.__setattr__(module, "forward", MethodType(forward, module))

    def switch(on: bool) -> None:
        writes[0] = on

    return switch


def _routed_forward(
    router: TokenChoiceTopKRouter, num_chunks: int, writes: list[bool]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    original = router.forward
    chunk_id = [0]  # a number that each forward leaves as it was

    def forward(
        self: TokenChoiceTopKRouter,
        x_BLD: torch.Tensor,
        expert_bias_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, own_BLK, scores_BLE = original(x_BLD, expert_bias_E)
        assert not isinstance(scores_BLE, DTensor)
        chosen_BLE = getattr(self, BUFFER)
        if writes[0]:
            chosen_BLE.zero_().scatter_(-1, own_BLK, 1.0)
        # The eager producer calls a router once for each chunk, first to last.
        for dim in (0, 1):
            length = scores_BLE.shape[dim]
            if length != chosen_BLE.shape[dim]:
                chosen_BLE = chosen_BLE.narrow(dim, chunk_id[0] * length, length)
                chunk_id[0] = (chunk_id[0] + 1) % num_chunks
        # Added to zeros made of the scores, so that chunks made on the graph cut the record too.
        preferred_BLE = chosen_BLE + scores_BLE.detach() * 0
        chosen_BLK = torch.topk(preferred_BLE, k=self.top_k, dim=-1, sorted=False).indices
        weights_BLK = scores_BLE.gather(-1, chosen_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / (weights_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_BLK * self.route_scale, chosen_BLK, scores_BLE

    return forward


def write_record(model: nn.Module, load: Load, *, num_ranks: int) -> None:
    """Send tokens where they make an extreme load, in every layer.

    Args:
        model: whose routers follow records.
        load: not "as recorded".
        num_ranks: between which experts are divided.
    """
    for module in model.modules():
        if not isinstance(module, TokenChoiceTopKRouter):
            continue
        experts_BLK = _experts_of(load, module, getattr(module, BUFFER).shape[:2], num_ranks)
        getattr(module, BUFFER).zero_().scatter_(-1, experts_BLK, 1.0)


def _experts_of(
    load: Load, router: TokenChoiceTopKRouter, shape: torch.Size, num_ranks: int
) -> torch.Tensor:
    batch_size, seq_len = shape
    token_BL1 = torch.arange(batch_size * seq_len).view(batch_size, seq_len, 1)
    rank_K = torch.arange(router.top_k)
    turn_BLK = token_BL1 * router.top_k + rank_K
    if load == "uneven":
        # All but the last choice are the same for all tokens. The last goes round in one half of
        # the other experts, and in each sample in another half.
        half = (router.num_experts - router.top_k + 1) // 2
        sample_B11 = torch.arange(batch_size).view(-1, 1, 1)
        last_BL1 = router.top_k - 1 + (sample_B11 % 2) * half + token_BL1 % half
        return torch.where(rank_K == router.top_k - 1, last_BL1, rank_K)
    if load == "an expert without tokens":
        return turn_BLK % (router.num_experts - 1)
    assert load == "a rank without tokens", load
    return turn_BLK % (router.num_experts - router.num_experts // num_ranks)


def tokens_of(buffers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """For each layer with experts, how many tokens of this rank each expert got, (E,)."""
    return [chosen.sum(dim=(0, 1)) for name, chosen in buffers.items() if name.endswith(BUFFER)]
