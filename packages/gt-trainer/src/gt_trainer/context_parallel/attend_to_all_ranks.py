"""Attention of each rank's queries to the keys and values of all ranks that share the sequence.

torchtitan wraps the forward of each layer's inner attention for that, and so do we, at the same
place (``torchtitan/distributed/context_parallel/api.py``): inside of what tensor parallelism puts
around it, so that a rank gathers its own heads. torchtitan's operator hides its collectives from a
graph, and its scaled dot product takes no mask; ours are in the graph, for both kinds of attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.attention import BaseAttention

from gt_config import ContextParallelStrategy
from gt_trace.context_parallel import (
    BlockAttention,
    SequenceAxis,
    gather_sequence,
    ring_attention,
)
from gt_trainer.context_parallel.block_attention import DenseBlockAttention, FlexBlockAttention
from gt_trainer.decoder.attention import DocumentCausalSDPA


def attend_to_all_ranks(
    model: nn.Module, mesh: DeviceMesh, *, strategy: ContextParallelStrategy = "gather"
) -> int:
    """Let every layer's inner attention see the keys and values of all ranks of ``mesh``.

    Before ``Module.parallelize``, which wraps what it finds. A forward takes queries, keys and
    values (B, l, heads, width) of this rank's tokens, and its mask is of this rank's tokens to all;
    for a ring, as ``ring_masks`` or ``batch_of_rank`` make it.

    Args:
        model: a torchtitan decoder, or a stage of one; changed in place.
        mesh: the one axis of the ranks that share a sequence.
        strategy: how keys and values reach the ranks.

    Returns:
        How many layers attend so.
    """
    axis = SequenceAxis.of(mesh)
    inner: list[Any] = [m.inner_attention for m in model.modules() if isinstance(m, BaseAttention)]
    for attention in inner:
        is_dense = isinstance(attention, DocumentCausalSDPA)
        if strategy == "gather":
            attention.forward = _gathering(attention.forward, axis)
        else:
            attention.forward = _in_a_ring(attention.forward, axis, is_dense=is_dense)
    return len(inner)


def _gathering(attend: Any, axis: SequenceAxis) -> Any:
    @functools.wraps(attend)
    def forward(
        q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        keys, values = gather_sequence((k_BLNH, v_BLNH), axis)
        attended: torch.Tensor = attend(q_BLNH, keys, values, **options)
        return attended

    return forward


def _in_a_ring(attend: Any, axis: SequenceAxis, *, is_dense: bool) -> Any:
    @functools.wraps(attend)
    def forward(
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        **options: Any,
    ) -> torch.Tensor:
        block: BlockAttention
        if is_dense:
            masks = attention_masks.split(k_BLNH.shape[1], dim=-1)
            block = DenseBlockAttention(scale=options.get("scale"))
        else:
            masks = attention_masks
            block = FlexBlockAttention(forward=attend, options=options)
        return ring_attention(q_BLNH, k_BLNH, v_BLNH, masks, block, axis)

    return forward
