"""torchtitan's parallelism options, and ours among them."""

from __future__ import annotations

import dataclasses

from torchtitan.config import ParallelismConfig

from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.models.llama3 import llama3_405b_pp, llama3_debugmodel
from gt_trainer.parallelism_options import (
    TrainerParallelismConfig,
    balance_of,
    with_own_options,
)


def test_torchtitans_own_configuration_is_given_the_defaults_of_ours():
    given = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=4)
    own = with_own_options(given)
    assert isinstance(own, TrainerParallelismConfig)
    for field in dataclasses.fields(given):
        assert getattr(own, field.name) == getattr(given, field.name)
    assert own.pipeline_parallel_balance == "layers"
    assert with_own_options(own) is own


def test_every_configuration_has_them():
    for config in (llama3_debugmodel(), llama3_405b_pp()):
        assert isinstance(config.parallelism, TrainerParallelismConfig)
        published = ParallelismConfig(spmd_backend="partial_dtensor")
        again = dataclasses.replace(config, parallelism=published)
        assert isinstance(again.parallelism, TrainerParallelismConfig)


def test_the_flag_stands_among_torchtitans():
    config = apply_overrides(
        llama3_debugmodel(), ["--parallelism.pipeline_parallel_balance", "simulated"]
    )
    assert balance_of(config.parallelism) == "simulated"


def test_torchtitans_own_configuration_balances_by_layers():
    assert balance_of(ParallelismConfig()) == "layers"
