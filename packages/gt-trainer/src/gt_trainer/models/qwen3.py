"""Qwen3 configurations, dense and with experts (torchtitan/models/qwen3/config_registry.py)."""

from __future__ import annotations

from typing import Any

from torchtitan.models.qwen3 import config_registry

from gt_trainer.models.adapt import adapt_debug, adapt_published
from gt_trainer.trainer import GraphTrainer

_NUM_MOE_LAYERS = 4
_EXPERT_WIDTH = 128


def qwen3_debugmodel() -> GraphTrainer.Config:
    """8 layers of width 256, 2048 tokens, embedding and output projection tied."""
    return adapt_debug(config_registry.qwen3_debugmodel(), learning_rate=2e-3, batch_size=4)


def qwen3_moe_debugmodel() -> GraphTrainer.Config:
    """4 layers of width 256 with 64 experts of width 128 each, 8 for a token.

    torchtitan's debug model has 8 layers and experts six times as wide, too many for a laptop.
    """
    published = config_registry.qwen3_moe_debug()
    assert published.model_spec is not None
    model: Any = published.model_spec.model
    model.layers = model.layers[:_NUM_MOE_LAYERS]
    for layer in model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = _EXPERT_WIDTH
    return adapt_debug(published, learning_rate=1e-3, batch_size=2)


def qwen3_14b() -> GraphTrainer.Config:
    """14B parameters; 8 ranks: FSDP 8."""
    return adapt_published(config_registry.qwen3_14b())
