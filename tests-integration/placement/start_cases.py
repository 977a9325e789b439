"""A small configuration for ``gt-train --module``."""

from __future__ import annotations

from dataclasses import replace

from gt_config import AutoParallelConfig
from gt_trainer.models import llama3
from gt_trainer.trainer import GraphTrainer


def one_layer() -> GraphTrainer.Config:
    """A decoder of one layer that a solver places on two ranks."""
    config = llama3.llama3_debugmodel()
    assert config.model_spec is not None
    model = config.model_spec.model
    model.layers = model.layers[:1]
    solver = AutoParallelConfig(relative_gap=0.1)
    config.compile = replace(config.compile, autoparallel=True, autoparallel_solver=solver)
    config.parallelism.data_parallel_shard_degree = 2
    config.training.seq_len, config.training.local_batch_size = 32, 1
    config.checkpoint.interval = 1
    config.metrics.log_freq = 1
    return config


def two_stages() -> GraphTrainer.Config:
    """A decoder of two layers, on two stages of two ranks each."""
    config = one_layer()
    assert config.model_spec is not None
    model = config.model_spec.model
    model.layers = [*model.layers, *llama3.llama3_debugmodel().model_spec.model.layers[1:2]]
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.training.local_batch_size = 2
    return config
