"""Attention of each rank's queries to the keys and values of all ranks that share the sequence.

torchtitan wraps the forward of each layer's inner attention for that, and so do we, at the same
place (``torchtitan/distributed/context_parallel/api.py``): inside of what tensor parallelism puts
around it, so that a rank gathers its own heads. torchtitan's operator hides its collectives from a
graph, and its scaled dot product takes no mask; ours are in the graph, for both kinds of attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import BaseAttention

from gt_config import ContextParallelStrategy
from gt_trace.context_parallel import (
    BlockAttention,
    SequenceAxis,
    gather_sequence,
    ring_attention,
)
from gt_trace.context_parallel.ring_attention import Gradients
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


# How each kind of inner attention attends to a part of the keys, forward and backward.
@dataclass(frozen=True, slots=True, kw_only=True)
class DenseBlockAttention:
    """``DocumentCausalSDPA`` for a block of keys: the same kernel, told of the other blocks.

    Its backward is exact for a block if it is given the output and the logarithm of the sum of
    exponentials over all of them.
    """

    scale: float | None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``BlockAttention``; ``mask`` is (B, 1, l, l) bool."""
        width = v.shape[-1]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2),
            k.transpose(1, 2),
            _as_wide(v, q).transpose(1, 2),
            attn_mask=_added_to_scores(mask, q.dtype),
            scale=self.scale,
        )
        # The kernel says 0 of a query without keys.
        has_keys = mask.any(dim=-1)
        lse = torch.where(has_keys, lse, float("-inf"))
        return out.transpose(1, 2)[..., :width], lse.transpose(1, 2)

    def gradients(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor,
    ) -> Gradients:
        """See ``BlockAttention``; ``mask`` as for ``attend``."""
        width = v.shape[-1]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _as_wide(gradient, q).transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            _as_wide(v, q).transpose(1, 2),
            _as_wide(out, q).transpose(1, 2),
            lse.transpose(1, 2),
            0.0,
            False,
            attn_mask=_added_to_scores(mask, q.dtype),
            scale=self.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)[..., :width]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexBlockAttention:
    """torchtitan's FlexAttention for a block of keys.

    Its operator knows the backward of its own output alone. So the backward attends to the block
    once more, and differentiates what the block has a share of.
    """

    forward: Any
    """Of the module that attends, before it was wrapped."""

    options: dict[str, Any]
    """Of each call, without the mask."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``BlockAttention``."""
        out, lse = self.forward(
            q, k, v, attention_masks=mask, out_transform=lambda *found: found, **self.options
        )
        return out, lse.float()

    def gradients(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: BlockMask,
    ) -> Gradients:
        """See ``BlockAttention``."""
        given = [each.detach().requires_grad_() for each in (q, k, v)]
        with torch.enable_grad():
            block_out, block_lse = self.attend(given[0], given[1], given[2], mask)
        # out = sum of share * block_out, where share = exp(block_lse - lse) depends on all blocks.
        share = (block_lse.detach() - lse).exp()
        of_out = gradient.float() * share.unsqueeze(-1)
        distance = block_out.detach().float() - out.float()
        of_lse = (of_out * distance).sum(dim=-1)
        dq, dk, dv = torch.autograd.grad(
            (block_out, block_lse), given, (of_out.to(block_out.dtype), of_lse)
        )
        return dq, dk, dv


def _as_wide(values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Padded to the width of the queries, as the kernel wants it (``DocumentCausalSDPA``)."""
    padding = queries.shape[-1] - values.shape[-1]
    return F.pad(values, (0, padding)) if padding > 0 else values


def _added_to_scores(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query may attend to a key, and -inf where not."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, float("-inf"))
