"""Llama 3 configurations (torchtitan/models/llama3/config_registry.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from gt_trainer.models.adapt import adapt_debug, adapt_published
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.trainer import GraphTrainer


def llama3_debugmodel() -> GraphTrainer.Config:
    """6 layers of width 256, 2048 tokens."""
    return adapt_debug(config_registry.llama3_debugmodel(), learning_rate=2e-3, batch_size=16)


def llama3_debugmodel_flex_attn() -> GraphTrainer.Config:
    """``llama3_debugmodel`` by the name of its attention, FlexAttention, which needs a GPU."""
    return llama3_debugmodel()


def llama3_8b() -> GraphTrainer.Config:
    """8B parameters; 8 ranks: FSDP 4 x TP 2."""
    return adapt_published(config_registry.llama3_8b(), tensor_parallel_degree=2)


def llama3_70b() -> GraphTrainer.Config:
    """70B parameters; 256 ranks: FSDP 32 x TP 8."""
    return adapt_published(config_registry.llama3_70b(), tensor_parallel_degree=8)


def llama3_405b() -> GraphTrainer.Config:
    """405B parameters; 1024 ranks: FSDP 128 x TP 8."""
    return _of_405b(local_batch_size=2, tensor_parallel_degree=8)


def llama3_405b_pp() -> GraphTrainer.Config:
    """405B parameters in a pipeline; 512 ranks: FSDP 8 x TP 8 x PP 8, two stages on each rank.

    Degrees, schedule and batch are those of torchtitan's published measurement on 512 H100
    (``benchmarks/llama3_h100_202412_torchtitan.md`` there, table 5); microbatches of one sequence.
    """
    return _of_405b(
        local_batch_size=32,
        tensor_parallel_degree=8,
        pipeline_parallel_degree=8,
        pipeline_parallel_schedule="Interleaved1F1B",
    )


def _of_405b(*, local_batch_size: int, **parallelism: Any) -> GraphTrainer.Config:
    """Our own, and not torchtitan's function, which builds Float8 converters where it is called.

    It needs torchao and a device for that, and a dry run needs none. The converter is named in the
    options; steps, schedule of the learning rate and recomputation are as published there.
    """
    model_spec = model_registry("405B")
    adapted = adapt_published(
        Trainer.Config(
            model_spec=model_spec,
            hf_assets_path="./assets/hf/Llama-3.1-405B",
            loss=ChunkedLossWrapper.Config(
                loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))
            ),
            optimizer=default_adamw(lr=8e-5),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=600),
            training=TrainingConfig(local_batch_size=local_batch_size, seq_len=8192, steps=3000),
            dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
            activation_checkpoint=FullAC.Config(),
            checkpoint=CheckpointManager.Config(interval=500),
            validator=Validator.Config(freq=500, steps=1200),
            metrics=MetricsProcessor.Config(enable_tensorboard=True),
            profiler=Profiler.Config(enable_profiling=True, profile_freq=100),
        ),
        **parallelism,
    )
    return dataclasses.replace(
        adapted, quantization=QuantizationConfig(linears="float8_rowwise", skip=("lm_head",))
    )
