"""Llama 3 configurations (torchtitan/models/llama3/config_registry.py)."""

from __future__ import annotations

import dataclasses

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.llama3 import config_registry, model_registry

from gt_trainer.models.adapt import adapt_debug, adapt_published, say_converters_dropped
from gt_trainer.trainer import GraphTrainer


def llama3_debugmodel() -> GraphTrainer.Config:
    """6 layers of width 256, 2048 tokens."""
    return adapt_debug(config_registry.llama3_debugmodel(), learning_rate=2e-3, batch_size=16)


def llama3_8b() -> GraphTrainer.Config:
    """8B parameters; 8 ranks: FSDP 4 x TP 2."""
    return adapt_published(config_registry.llama3_8b(), tensor_parallel_degree=2)


def llama3_70b() -> GraphTrainer.Config:
    """70B parameters; 256 ranks: FSDP 32 x TP 8."""
    return adapt_published(config_registry.llama3_70b(), tensor_parallel_degree=8)


def llama3_405b() -> GraphTrainer.Config:
    """405B parameters; 1024 ranks: FSDP 128 x TP 8.

    torchtitan's own function builds Float8 converters, which need torchao. So this takes the 70B
    configuration and puts in what the published 405B one has otherwise.
    """
    say_converters_dropped("llama3_405b", "Float8LinearConverter")
    published = config_registry.llama3_70b()
    return adapt_published(
        dataclasses.replace(
            published,
            model_spec=model_registry("405B"),
            hf_assets_path="./assets/hf/Llama-3.1-405B",
            optimizer=default_adamw(lr=8e-5),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=600),
            training=dataclasses.replace(published.training, local_batch_size=2, steps=3000),
        ),
        tensor_parallel_degree=8,
    )
