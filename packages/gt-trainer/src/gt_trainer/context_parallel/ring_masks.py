"""FlexAttention's mask of a rank's tokens, one for each rank whose keys come by in a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask


def ring_masks(mask: BlockMask, *, num_ranks: int, rank: int) -> tuple[BlockMask, ...]:
    """Cut a mask along its keys.

    Args:
        mask: of this rank's queries to the keys of all ranks, in the order of the ranks.
        num_ranks: that share a sequence.
        rank: this one among them.

    Returns:
        Masks for the keys of this rank, of the rank before it, and so on around.
    """
    num_queries, num_keys = mask.seq_lengths
    keys_of_block = mask.BLOCK_SIZE[1]
    if num_keys % (num_ranks * keys_of_block):
        raise ValueError(
            f"{num_keys} keys are no multiple of {num_ranks} ranks * {keys_of_block} keys, a block "
            "of the mask: choose a smaller block_size, or --compile.context_parallel gather"
        )
    partial = _marked(mask.kv_num_blocks, mask.kv_indices)
    full = (
        None
        if mask.full_kv_num_blocks is None
        else _marked(mask.full_kv_num_blocks, mask.full_kv_indices)
    )
    num_blocks = partial.shape[-1] // num_ranks
    masks = []
    for step in range(num_ranks):
        owner = (rank - step) % num_ranks
        place = slice(owner * num_blocks, (owner + 1) * num_blocks)
        counts, indices = _listed(partial[..., place])
        full_counts, full_indices = (None, None) if full is None else _listed(full[..., place])
        masks.append(
            BlockMask.from_kv_blocks(
                counts,
                indices,
                full_counts,
                full_indices,
                BLOCK_SIZE=mask.BLOCK_SIZE,
                mask_mod=_of_later_keys(mask.mask_mod, owner * (num_keys // num_ranks)),
                seq_lengths=(num_queries, num_keys // num_ranks),
            )
        )
    return tuple(masks)


def _of_later_keys(mask_mod: Any, first: int) -> Any:
    def shifted(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        allowed: torch.Tensor = mask_mod(b, h, q_idx, kv_idx + first)
        return allowed

    return shifted


def _marked(counts: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """(..., rows, blocks) bool, from how many blocks each row has, and which come first."""
    assert indices is not None
    place = torch.arange(indices.shape[-1], device=indices.device)
    is_listed = (place < counts.unsqueeze(-1)).to(torch.int32)
    return torch.zeros_like(indices).scatter(-1, indices.long(), is_listed).bool()


def _listed(marked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse."""
    marks = marked.to(torch.int32)
    order = torch.argsort(marks, dim=-1, descending=True, stable=True)
    return marks.sum(dim=-1, dtype=torch.int32), order.to(torch.int32).contiguous()
