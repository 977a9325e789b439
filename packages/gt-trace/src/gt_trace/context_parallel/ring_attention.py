"""Attention to all keys and values of a sequence that ranks share, which go around a ring.

Each rank begins with its own keys and values, and passes on what it is attending to (Liu et al.,
"Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889). What its
queries found in one block and in another is merged by the logarithms of the
sums of exponentials. No rank ever holds more than two blocks. The backward sends keys and values
around once more, and the sums of their gradients behind them, until these are where they belong.

Every send is launched before a block is attended to, and waited for after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gt_config.node_keys import CpCollectiveAnnotation, CpCollectiveKind
from gt_trace.annotate import annotate
from gt_trace.context_parallel.sequence_axis import SequenceAxis

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockAttention(Protocol):
    """How queries attend to one block of keys, as part of more."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to a block as if there were no other.

        Args:
            q: (B, l, N, H) queries.
            k: (B, l, M, H) keys; N is a multiple of M.
            v: (B, l, M, W) values.
            mask: which query may attend to which of the keys.

        Returns:
            (B, l, N, W), 0 for a query without keys here; and (B, l, N), the natural
            logarithm of its sum of exponentials, in float32 or more, -inf for such a query.
        """

    def gradients(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: Any,
    ) -> Gradients:
        """What a block adds to the gradients of queries, and those of its keys and values.

        Args:
            gradient: of ``out``.
            q: see ``attend``.
            k: see ``attend``.
            v: see ``attend``.
            mask: see ``attend``.
            out: (B, l, N, W), merged over all blocks.
            lse: (B, l, N), likewise.
        """


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Sequence[Any],
    block: BlockAttention,
    axis: SequenceAxis,
) -> torch.Tensor:
    """Attend to the keys and values of all ranks of ``axis``; differentiable.

    Args:
        q: (B, l, N, H) queries of this rank's tokens.
        k: (B, l, M, H) keys of the same tokens.
        v: (B, l, M, W) values of the same tokens.
        masks: one for each rank in the order in which its keys come by: this rank's own first, then
            those of the ranks before it.
        block: attends to each.
        axis: the ranks.

    Returns:
        (B, l, N, W) in the dtype of the values.
    """
    attended: torch.Tensor = _RingAttention.apply(q, k, v, masks, block, axis)
    return attended


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        masks: Sequence[Any],
        block: BlockAttention,
        axis: SequenceAxis,
    ) -> torch.Tensor:
        here, coming = _packed(k, v), None
        out, lse = None, None
        for step, mask in enumerate(masks):
            if step < axis.num_ranks - 1:
                coming = _launched(here, axis, "pass_on")
            keys, values = _unpacked(here, k, v)
            block_out, block_lse = block.attend(q, keys, values, mask)
            out, lse = _merged(out, lse, _precise(block_out), block_lse)
            if step < axis.num_ranks - 1:
                assert coming is not None
                here = _waited_for(coming, axis, "pass_on")
        assert out is not None
        assert lse is not None
        merged = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, merged, lse)
        ctx.masks, ctx.block, ctx.axis = masks, block, axis
        return merged

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis: SequenceAxis = ctx.axis
        block: BlockAttention = ctx.block
        here, coming, sums = _packed(k, v), None, None
        of_queries: torch.Tensor | None = None
        for step, mask in enumerate(ctx.masks):
            if step < axis.num_ranks - 1:
                coming = _launched(here, axis, "pass_on")
            keys, values = _unpacked(here, k, v)
            dq, dk, dv = block.gradients(gradient, q, keys, values, out, lse, mask)
            of_queries = _precise(dq) if of_queries is None else of_queries + dq
            of_block = _packed(dk, dv)
            if sums is not None:
                of_block = of_block + _waited_for(sums, axis, "pass_on_grad")
            sums = _launched(of_block, axis, "pass_on_grad")
            if step < axis.num_ranks - 1:
                assert coming is not None
                here = _waited_for(coming, axis, "pass_on")
        assert of_queries is not None
        assert sums is not None
        of_keys, of_values = _unpacked(_waited_for(sums, axis, "pass_on_grad"), k, v)
        return of_queries.to(q.dtype), of_keys, of_values, None, None, None


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, in which blocks are summed; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _merged(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    block_out: torch.Tensor,
    block_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over two sets of keys, from that over each: weighted by their shares of the sum.

    The first block is a rank's own, in which every query has a key, so that the share of a block
    without keys is 0 and not 0 / 0.
    """
    if out is None or lse is None:
        return block_out, block_lse
    share_of_block = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    return torch.lerp(out, block_out, share_of_block), torch.logaddexp(lse, block_lse)


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Both in one row, for one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(
    row: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two of a row, in the shapes of ``k`` and ``v``."""
    num_keys = k.numel()
    return row[:num_keys].view(k.shape), row[num_keys:].view(v.shape)


def _launched(row: torch.Tensor, axis: SequenceAxis, kind: CpCollectiveKind) -> torch.Tensor:
    """Send to the next rank, and receive from the one before: an all-to-all with one part."""
    to, taken_from = [0] * axis.num_ranks, [0] * axis.num_ranks
    to[(axis.rank + 1) % axis.num_ranks] = row.numel()
    taken_from[(axis.rank - 1) % axis.num_ranks] = row.numel()
    with annotate(CpCollectiveAnnotation(kind=kind, mesh_axis=axis.name)):
        launched: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
            row, taken_from, to, axis.group_name
        )
    return launched


def _waited_for(launched: torch.Tensor, axis: SequenceAxis, kind: CpCollectiveKind) -> torch.Tensor:
    with annotate(CpCollectiveAnnotation(kind=kind, mesh_axis=axis.name)):
        received: torch.Tensor = torch.ops._c10d_functional.wait_tensor(launched)
    return received
