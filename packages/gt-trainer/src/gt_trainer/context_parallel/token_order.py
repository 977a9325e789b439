"""Which tokens of a sequence each of the ranks has that share it, as torchtitan divides them.

A causal mask leaves little to do for the first tokens and much for the last. So tokens are put in
another order before each rank gets its part of equal length
(``--parallelism.context_parallel_load_balancer``, ``torchtitan/distributed/context_parallel``).
Each token keeps its position in its document, and attention is told by masks who sees whom.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch.nn.attention.flex_attention import create_block_mask

from gt_trainer._torch_internals import head_tail_order, round_robin_order
from gt_trainer.decoder.attention import document_causal_mask

LoadBalancer = Literal["headtail", "ptrr"]
"""headtail: each rank has a part of the head of a sequence and its mirror image of the tail.
ptrr: each rank has blocks of tokens whose numbers of keys, in this batch, add up to about as many.
"""

ROUND_ROBIN_BLOCK = 128
"""Tokens of a block of ``ptrr`` where no FlexAttention says it; its default."""


def token_order(
    positions: torch.Tensor, *, num_ranks: int, load_balancer: LoadBalancer | None
) -> torch.Tensor:
    """The tokens of each sample in the order in which ranks have them, one rank after the other.

    Args:
        positions: (B, L) positions of tokens in their documents, of the whole sequence.
        num_ranks: how many ranks share it.
        load_balancer: None leaves tokens as they are.

    Returns:
        (B, L) indices of tokens. Rank r has those in [r * L / num_ranks, (r + 1) * L / num_ranks).
    """
    batch, length = positions.shape
    if load_balancer == "ptrr":
        whole = document_causal_mask(positions)
        mask = create_block_mask(
            lambda b, h, q, k: whole[b, 0, q, k],
            batch,
            1,
            length,
            length,
            device=positions.device,
            BLOCK_SIZE=ROUND_ROBIN_BLOCK,
        )
        return round_robin_order(mask, num_ranks)
    if load_balancer == "headtail":
        order = head_tail_order(length, num_ranks, positions.device)
    else:
        order = torch.arange(length, device=positions.device)
    return order.to(torch.int64).expand(batch, length)


def load_balancer_of(name: str | None) -> LoadBalancer | None:
    """Torchtitan's option, whose values it does not list.

    Raises:
        ValueError: there is no such load balancer.
    """
    if name is not None and name not in get_args(LoadBalancer):
        raise ValueError(f"no load balancer {name!r}; allowed: None, headtail, ptrr")
    return cast("LoadBalancer | None", name)
