"""The whole batch of one forward, without data: what a decoder is planned and evaluated with."""

from __future__ import annotations

import torch
from torchtitan.config import TrainingConfig
from torchtitan.models.common.decoder import Decoder

from gt_trainer.decoder.attention import attention_mask_for


def example_inputs(training: TrainingConfig, num_shards: int) -> tuple[torch.Tensor, ...]:
    """Positional arguments of a decoder's forward: tokens (B, L) of all ranks, on meta.

    Args:
        training: gives batch and sequence lengths.
        num_shards: into how many parts the batch is cut.
    """
    return (_integers(training, num_shards),)


def example_kwargs(
    model: Decoder, training: TrainingConfig, num_shards: int
) -> dict[str, torch.Tensor]:
    """Keyword arguments, likewise: positions (B, L), and the mask of documents if there is one."""
    positions = _integers(training, num_shards)
    mask = attention_mask_for(model.config, positions)
    return {"positions": positions} | ({} if mask is None else {"attention_masks": mask})


def _integers(training: TrainingConfig, num_shards: int) -> torch.Tensor:
    shape = (training.local_batch_size * num_shards, training.seq_len)
    return torch.empty(shape, dtype=torch.int64, device="meta")
