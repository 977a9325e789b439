"""One rank's part of a batch whose sequences it shares, for models that attend under a dense mask.

torchtitan divides batches by itself, with the masks of FlexAttention. Here are those of
``DocumentCausalSDPA``, which it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gt_config import ContextParallelStrategy
from gt_trainer.context_parallel.token_order import LoadBalancer, token_order
from gt_trainer.decoder.attention import AttentionMaskError, document_causal_mask


def batch_of_rank(
    batch: Mapping[str, torch.Tensor],
    labels: torch.Tensor,
    mesh: DeviceMesh,
    *,
    load_balancer: LoadBalancer | None,
    strategy: ContextParallelStrategy = "gather",
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """What torchtitan's ``post_dataloading_process`` returns, for this rank's tokens.

    Args:
        batch: "input" and "positions", (B, L) each, whole sequences.
        labels: (B, L), likewise.
        mesh: the one axis of the ranks that share them.
        load_balancer: which tokens are this rank's.
        strategy: in which order their keys will be attended to.

    Returns:
        Tokens and labels (B, l); and "positions" (B, l) with "attention_masks" (B, 1, l, L), whose
        keys are in the order of the ranks; in a ring this rank's first, and then those of the
        ranks before it.

    Raises:
        AttentionMaskError: the batch has no positions.
    """
    positions = batch.get("positions")
    if positions is None:
        raise AttentionMaskError.without_positions()
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    order = token_order(positions, num_ranks=num_ranks, load_balancer=load_balancer)
    of_ranks = order.chunk(num_ranks, dim=1)
    mine, keys = of_ranks[rank], order
    if strategy == "ring":
        keys = torch.cat([of_ranks[(rank - step) % num_ranks] for step in range(num_ranks)], dim=1)
    parts = {name: value.gather(1, mine) for name, value in batch.items()}
    extra: dict[str, Any] = {name: part for name, part in parts.items() if name != "input"}
    extra["attention_masks"] = document_causal_mask(positions, queries=mine, keys=keys)
    return parts["input"], labels.gather(1, mine), extra
