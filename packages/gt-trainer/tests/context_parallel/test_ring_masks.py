"""A rank's mask of FlexAttention, cut along the ranks whose keys come by."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from gt_trainer.context_parallel.ring_masks import ring_masks

BLOCK, RANKS, LENGTH = 4, 3, 16  # tokens of a rank: 16
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 28, [0] * 7 + [1] * 30 + [2] * 11])


def is_allowed(b, h, q, k, *, first=0):
    q = q + first
    return (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


def dense(mask):
    """(B, q, k) of every pair, by the function; and by blocks: none, some or all of their pairs."""
    queries, keys = mask.seq_lengths
    samples = torch.arange(2).view(-1, 1, 1)
    rows, columns = torch.arange(queries).view(1, -1, 1), torch.arange(keys).view(1, 1, -1)
    return mask.mask_mod(samples, torch.tensor(0), rows, columns)


def listed(counts, indices):
    """Blocks of each row of queries, whatever their order."""
    return [
        [sorted(row[:count].tolist()) for count, row in zip(c, i, strict=True)]
        for c, i in zip(counts[:, 0], indices[:, 0], strict=True)
    ]


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_mask_is_the_part_of_one_ranks_keys(rank):
    def of_rank(b, h, q, k):
        return is_allowed(b, h, q, k, first=rank * LENGTH)

    whole = create_block_mask(
        of_rank, 2, None, LENGTH, RANKS * LENGTH, device="cpu", BLOCK_SIZE=BLOCK
    )
    masks = ring_masks(whole, num_ranks=RANKS, rank=rank)
    assert len(masks) == RANKS
    for step, mask in enumerate(masks):
        owner = (rank - step) % RANKS
        place = slice(owner * LENGTH, (owner + 1) * LENGTH)
        assert mask.seq_lengths == (LENGTH, LENGTH)
        assert torch.equal(dense(mask), dense(whole)[:, :, place])
        expected = create_block_mask(
            mask.mask_mod, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
        )
        for name in ("", "full_"):
            for side in ("kv", "q"):
                counts, indices = f"{name}{side}_num_blocks", f"{name}{side}_indices"
                assert listed(getattr(mask, counts), getattr(mask, indices)) == listed(
                    getattr(expected, counts), getattr(expected, indices)
                )
