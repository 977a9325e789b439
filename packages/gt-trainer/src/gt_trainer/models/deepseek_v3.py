"""DeepSeek V3 configurations (torchtitan/models/deepseek_v3/config_registry.py)."""

from __future__ import annotations

import dataclasses

from torchtitan.models.deepseek_v3 import config_registry
from torchtitan.trainer import Trainer

from gt_config import EpOverlapConfig
from gt_trainer.decoder.attention import replace_inner_attention
from gt_trainer.models.adapt import adapt_debug, adapt_published
from gt_trainer.trainer import GraphTrainer

_MICROBATCHES_671B = 120
"""Sequences of a step on each of 128 data-parallel ranks: 15,360 in all, as DeepSeek-V3 was trained
with (arXiv 2412.19437, section 4.2)."""


def deepseek_v3_debugmodel() -> GraphTrainer.Config:
    """6 layers of width 256 with multi-head latent attention; 8 experts, 3 for a token."""
    return adapt_debug(config_registry.deepseek_v3_debugmodel(), learning_rate=2e-3, batch_size=4)


def deepseek_v3_debugmodel_sdpa() -> GraphTrainer.Config:
    """``deepseek_v3_debugmodel`` that attends by scaled dot products, on GPUs too."""
    published = _with_sdpa(config_registry.deepseek_v3_debugmodel())
    return adapt_debug(published, learning_rate=2e-3, batch_size=4)


def deepseek_v3_16b() -> GraphTrainer.Config:
    """16B parameters; 32 ranks: FSDP 32, EP 32, hence 2 of the 64 experts on each."""
    return adapt_published(config_registry.deepseek_v3_16b(), expert_parallel_degree=32)


def deepseek_v3_16b_sdpa() -> GraphTrainer.Config:
    """``deepseek_v3_16b`` that attends by scaled dot products, on GPUs too."""
    return adapt_published(_with_sdpa(config_registry.deepseek_v3_16b()), expert_parallel_degree=32)


def deepseek_v3_671b() -> GraphTrainer.Config:
    """671B parameters; 512 ranks: FSDP 512, EP 64, hence 4 of the 256 experts on each.

    Each layer is recomputed: what the published SelectiveAC keeps does not fit into 80 GB.
    """
    return adapt_published(
        config_registry.deepseek_v3_671b(),
        memory_policy="full_recompute",
        expert_parallel_degree=64,
    )


def deepseek_v3_671b_pp() -> GraphTrainer.Config:
    """671B parameters in a pipeline; 2,048 ranks: PP 16, FSDP 128 and EP 64 in each of its stages.

    DualPipeV has two stages on each rank, of two layers. Each layer is recomputed, as in
    ``deepseek_v3_671b``. A dW of such a stage holds 5.5 GiB until it runs, most of it tokens that
    were sent to experts and their gradients: a rank puts off 8, and not 16 as the schedule would.
    Token exchanges of one half of a sequence run beside the experts of the other (EP overlap).
    """
    published = config_registry.deepseek_v3_671b()
    adapted = adapt_published(
        dataclasses.replace(
            published,
            training=dataclasses.replace(published.training, local_batch_size=_MICROBATCHES_671B),
        ),
        memory_policy="full_recompute",
        expert_parallel_degree=64,
        pipeline_parallel_degree=16,
        pipeline_parallel_schedule="DualPipeV",
    )
    return dataclasses.replace(
        adapted,
        compile=dataclasses.replace(
            adapted.compile,
            pipeline_deferred_weights=8,
            ep_overlap=EpOverlapConfig(enabled=True, chunk_dim="seq", module_fqn="layers.*.moe"),
        ),
    )


def _with_sdpa(published: Trainer.Config) -> Trainer.Config:
    """Replace the inner attention, whose mask of documents torchtitan's SDPA does not take."""
    assert published.model_spec is not None
    replace_inner_attention(published.model_spec.model)
    return published
