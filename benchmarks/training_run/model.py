"""A decoder of transformers' Qwen3, with parameters in float32 that computes in bfloat16."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM


class Predictor(nn.Module):
    """A causal language model that maps tokens to logits under autocast."""

    def __init__(self, config: Qwen3Config, device: torch.device) -> None:
        super().__init__()
        self.decoder = Qwen3ForCausalLM(config)
        self._device_type = device.type

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (B, L, V) in bfloat16, of tokens, (B, L)."""
        # No mask: attention is causal by its own argument, in every contestant.
        masks = {"full_attention": None}
        with torch.autocast(self._device_type, dtype=torch.bfloat16):
            return self.decoder(tokens, attention_mask=masks, use_cache=False).logits


def predictor(
    *, dim: int, num_layers: int, vocab: int, seq: int, device: torch.device, seed: int
) -> Predictor:
    """Build the model with the random weights of a seed, on the device."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, dim // 128),
        num_key_value_heads=max(1, dim // 256),
        head_dim=min(dim, 128),
        max_position_embeddings=seq,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    with device:
        return Predictor(config, device).train()
