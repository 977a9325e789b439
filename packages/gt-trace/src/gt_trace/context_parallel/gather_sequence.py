"""Gathering keys or values of a sequence that ranks share: one autograd function.

Each rank attends with its own queries to the keys and values of all tokens (as "The Llama 3 Herd of
Models", arXiv 2407.21783, section 3.3.2). The forward gathers; the backward adds up what every
rank's queries say of a token, and leaves each rank the sums of its own tokens. torchtitan does so
for FlexAttention (``torchtitan/distributed/context_parallel/api.py``), in an operator that no pass
can look into. Here it is functional collectives on plain tensors, which a trace records and passes
can move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gt_config.node_keys import CpCollectiveAnnotation
from gt_trace.annotate import annotate
from gt_trace.context_parallel.sequence_axis import SequenceAxis


def gather_sequence(parts: Sequence[torch.Tensor], axis: SequenceAxis) -> tuple[torch.Tensor, ...]:
    """Gather the tokens of all ranks of ``axis``; differentiable.

    Args:
        parts: (B, l, ...) each, this rank's tokens: its keys and its values. Of equal shapes on all
            ranks.
        axis: the ranks.

    Returns:
        (B, num_ranks * l, ...) each, in the order of the ranks. What their gradients are on all
        ranks is summed, and arrives at ``parts`` as the sum of this rank's tokens.
    """
    gathered: tuple[torch.Tensor, ...] = _GatherSequence.apply(axis, *parts)
    return gathered


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis = axis
        functional = torch.ops._c10d_functional
        with annotate(CpCollectiveAnnotation(kind="gather", mesh_axis=axis.name)):
            # All are under way before the first is waited for.
            launched = [
                functional.all_gather_into_tensor(
                    part.contiguous(), axis.num_ranks, axis.group_name
                )
                for part in parts
            ]
            return tuple(_tokens_in_order(functional.wait_tensor(g), axis) for g in launched)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis: SequenceAxis = ctx.axis
        functional = torch.ops._c10d_functional
        with annotate(CpCollectiveAnnotation(kind="reduce_grad", mesh_axis=axis.name)):
            launched = [
                functional.reduce_scatter_tensor(
                    _ranks_in_order(gradient, axis), "sum", axis.num_ranks, axis.group_name
                )
                for gradient in gradients
            ]
            return None, *(functional.wait_tensor(reduced) for reduced in launched)


def _tokens_in_order(gathered: torch.Tensor, axis: SequenceAxis) -> torch.Tensor:
    """(n * B, l, ...), as the collective puts ranks together, as (B, n * l, ...).

    Of one sample that is a view.
    """
    size, length, *rest = gathered.shape
    by_rank = gathered.view(axis.num_ranks, size // axis.num_ranks, length, *rest).transpose(0, 1)
    return by_rank.flatten(1, 2)


def _ranks_in_order(tokens: torch.Tensor, axis: SequenceAxis) -> torch.Tensor:
    """The inverse, contiguous."""
    size, length, *rest = tokens.shape
    by_rank = tokens.reshape(size, axis.num_ranks, length // axis.num_ranks, *rest).transpose(0, 1)
    return by_rank.flatten(0, 1).contiguous()
