"""The whole batch of one forward, without data: what a decoder is planned and evaluated with."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.config import TrainingConfig
from torchtitan.models.common.decoder import Decoder

from gt_trainer.decoder.attention import attends_with_flex_attention, attention_mask_for


def example_inputs(training: TrainingConfig, num_shards: int) -> tuple[torch.Tensor, ...]:
    """Positional arguments of a decoder's forward: tokens (B, L) of all ranks, on meta.

    Args:
        training: gives batch and sequence lengths.
        num_shards: into how many parts the batch is cut.
    """
    return (_integers(training, num_shards),)


def example_kwargs(model: Decoder, training: TrainingConfig, num_shards: int) -> dict[str, Any]:
    """Keyword arguments, likewise: positions (B, L), and the mask of documents if there is one."""
    positions = _integers(training, num_shards)
    kwargs: dict[str, Any] = {"positions": positions}
    for mask in (
        attention_mask_for(model, positions),
        example_block_mask(model, positions),
    ):
        if mask is not None:
            kwargs["attention_masks"] = mask
    return kwargs


def example_block_mask(model: Decoder, positions: torch.Tensor) -> Any:
    """The ``BlockMask`` of ``positions`` where ``model`` attends with FlexAttention; else None.

    On meta, for a capture reads its shapes and functions only; and without the compilation of what
    makes it, which would take longer than the capture.
    """
    if not attends_with_flex_attention(model.config):
        return None
    with torch.compiler.set_stance("force_eager"):
        return model.get_attention_masks(positions=positions.to("meta"))


def _integers(training: TrainingConfig, num_shards: int) -> torch.Tensor:
    shape = (training.local_batch_size * num_shards, training.seq_len)
    return torch.empty(shape, dtype=torch.int64, device="meta")
