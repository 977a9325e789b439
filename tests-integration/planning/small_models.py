"""Configurations for plans whose recipes are all started: debug models of four layers.

``gt-train --module small_models`` finds them from this folder.
"""

from __future__ import annotations

import dataclasses

from gt_trainer.models.deepseek_v3 import deepseek_v3_debugmodel
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.trainer import GraphTrainer

_NUM_LAYERS = 4
_SEQ_LEN = 32


def llama3() -> GraphTrainer.Config:
    """Dense layers."""
    return _small(llama3_debugmodel())


def deepseek_v3() -> GraphTrainer.Config:
    """One dense layer, and three with experts."""
    return _small(deepseek_v3_debugmodel())


def _small(config: GraphTrainer.Config) -> GraphTrainer.Config:
    spec = config.model_spec
    assert spec is not None
    model = dataclasses.replace(spec.model, layers=spec.model.layers[:_NUM_LAYERS])
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(spec, model=model),
        training=dataclasses.replace(config.training, seq_len=_SEQ_LEN),
    )
