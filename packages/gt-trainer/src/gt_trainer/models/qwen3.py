"""Qwen3 configurations, dense and with experts (torchtitan/models/qwen3/config_registry.py)."""

from __future__ import annotations

from torchtitan.models.qwen3 import config_registry

from gt_trainer.models.adapt import adapt_debug, adapt_published
from gt_trainer.trainer import GraphTrainer


def qwen3_debugmodel() -> GraphTrainer.Config:
    """8 layers of width 256, 2048 tokens, embedding and output projection tied."""
    return adapt_debug(config_registry.qwen3_debugmodel(), learning_rate=2e-3, batch_size=4)


def qwen3_moe_debugmodel() -> GraphTrainer.Config:
    """8 layers of width 256 with 64 experts each, 8 for a token."""
    return adapt_debug(config_registry.qwen3_moe_debug(), learning_rate=1e-3, batch_size=4)


def qwen3_14b() -> GraphTrainer.Config:
    """14B parameters; 8 ranks: FSDP 8."""
    return adapt_published(config_registry.qwen3_14b())
