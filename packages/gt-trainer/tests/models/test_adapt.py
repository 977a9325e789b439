"""Configurations of torchtitan made capturable: what stays as somebody set it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torchtitan.models.llama3 import config_registry, model_registry

from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.models.adapt import adapt_published, is_as_published
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.trainer import GraphTrainer


class OwnTrainer(GraphTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(GraphTrainer.Config):
        decay: float = 0.9


def test_the_configuration_of_a_trainer_of_ones_own_keeps_its_class_and_fields():
    own = OwnTrainer.Config(model_spec=model_registry("debugmodel"), decay=0.5)
    adapted = adapt_published(own)
    assert is_as_published(own)
    assert not is_as_published(adapted)
    assert isinstance(adapted, OwnTrainer.Config)
    assert adapted.decay == 0.5


@pytest.mark.parametrize("mode", ["none", "aot_fx_trace"])
def test_options_that_were_set_stay(mode: str):
    options = TrainerCompileConfig(mode=mode, memory_policy="offload")  # type: ignore[arg-type]
    own = OwnTrainer.Config(model_spec=model_registry("debugmodel"), compile=options)
    assert adapt_published(own).compile == options


def test_what_torchtitan_publishes_becomes_a_configuration_of_ours():
    adapted = adapt_published(config_registry.llama3_debugmodel())
    assert type(adapted) is GraphTrainer.Config
    assert not is_as_published(adapted)
    assert not is_as_published(llama3_debugmodel())


def test_without_a_model_nothing_is_published():
    assert not is_as_published(OwnTrainer.Config())
