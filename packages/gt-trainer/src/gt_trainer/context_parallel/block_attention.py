"""How each kind of inner attention attends to a part of the keys, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from gt_trace.context_parallel.ring_attention import Gradients


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
