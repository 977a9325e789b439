"""Masks of FlexAttention go with their samples."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from gt_config import EpOverlapConfig
from gt_trainer.decoder.eager_chunks import chunked_for_capture, slice_block_mask

LENGTH = 256


def documents_mask():
    """Of 4 samples with documents that differ; asks a tensor of the whole batch."""
    document_BL = torch.arange(LENGTH).repeat(4, 1) // torch.tensor([[40], [130], [256], [64]])

    def mask_mod(b, h, q, kv):
        return (document_BL[b, q] == document_BL[b, kv]) & (q >= kv)

    return mask_mod


@pytest.mark.parametrize("start", [0, 2])
def test_a_chunk_of_a_block_mask_is_the_mask_of_its_samples(start: int):
    whole = create_block_mask(documents_mask(), 4, None, LENGTH, LENGTH, device="cpu")
    part = slice_block_mask(whole, start, 2)
    assert torch.equal(part.to_dense(), whole.to_dense()[start : start + 2])
    dense = create_mask(documents_mask(), 4, 1, LENGTH, LENGTH, device="cpu")
    found = create_mask(part.mask_mod, 2, 1, LENGTH, LENGTH, device="cpu")
    assert torch.equal(found, dense[start : start + 2])
    assert not torch.equal(dense[:2], dense[2:])


def test_a_block_mask_for_all_samples_stays_one():
    whole = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu")
    part = slice_block_mask(whole, 2, 2)
    assert torch.equal(part.to_dense(), whole.to_dense())


@pytest.mark.parametrize("options", [EpOverlapConfig(), EpOverlapConfig(enabled=True)])
def test_nothing_is_wrapped_unless_the_strategy_is_eager(options: EpOverlapConfig):
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": torch.nn.Identity()})})
    with chunked_for_capture(model, options):
        assert "forward" not in vars(model["layers"]["0"])
