"""What a run whose model a solver places cannot be combined with, each by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from torchtitan.components.loss import CrossEntropyLoss

from gt_config import AutoParallelConfig, Topology
from gt_trainer.decoder.chunked_loss import GraphChunkedLoss
from gt_trainer.device import intended_for
from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.placement.planned_loss import LossOfLogits, LossOfParts, loss_of
from gt_trainer.preflight.placement_violations import autoparallel_violations

TOPOLOGY = Topology(world=4, dp_shard=4, batch_size=2, seq_len=64)


def config_of(function, **changes):
    config = function()
    config.compile = dataclasses.replace(config.compile, autoparallel=True)
    return dataclasses.replace(config, **changes)


def flags_of(config, topology=TOPOLOGY):
    return {v.flag: v.allowed for v in autoparallel_violations(config, topology)}


def test_a_debug_model_on_several_ranks_is_accepted():
    assert flags_of(config_of(llama3.llama3_debugmodel)) == {}
    assert flags_of(config_of(deepseek_v3.deepseek_v3_debugmodel)) == {}


def test_says_nothing_of_runs_that_no_solver_places():
    config = SimpleNamespace(compile=SimpleNamespace(autoparallel=False))
    assert flags_of(config, dataclasses.replace(TOPOLOGY, world=1, dp_shard=1)) == {}


def test_refuses_one_rank():
    config = config_of(llama3.llama3_debugmodel)
    assert flags_of(config, dataclasses.replace(TOPOLOGY, world=1, dp_shard=1)) == {
        "--compile.autoparallel": "False on one rank: there is nothing to place",
    }
    stages_of_one_rank = dataclasses.replace(TOPOLOGY, world=4, dp_shard=1, pp=4)
    assert flags_of(config, stages_of_one_rank) == {
        "--compile.autoparallel": "False on one rank a stage: there is nothing to place",
    }


def test_refuses_stages_that_are_balanced_as_if_they_were_placed_by_hand():
    config = config_of(llama3.llama3_debugmodel)
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_balance = "simulated"
    topology = dataclasses.replace(TOPOLOGY, dp_shard=2, pp=2)
    assert flags_of(config, topology) == {
        "--parallelism.pipeline_parallel_balance": "'layers' or 'planned' with "
        "--compile.autoparallel: modules are priced as they are placed by hand",
    }
    config.parallelism.pipeline_parallel_balance = "planned"
    assert flags_of(config, topology) == {}


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (2, 4), (4, 2)])
def test_experts_go_with_tensor_parallelism(tp: int, ep: int):
    topology = dataclasses.replace(TOPOLOGY, world=4 * tp, dp_shard=4, tp=tp, ep=ep, seq_len=32)
    assert flags_of(config_of(deepseek_v3.deepseek_v3_debugmodel), topology) == {}


def test_refuses_experts_over_ranks_that_are_no_axes_with_tensor_parallelism():
    topology = dataclasses.replace(TOPOLOGY, world=24, dp_shard=6, tp=4, ep=6, seq_len=34)
    assert flags_of(config_of(deepseek_v3.deepseek_v3_debugmodel), topology) == {
        "--parallelism.expert_parallel_degree": "a divisor or a multiple of "
        "--parallelism.tensor_parallel_degree 4 with --compile.autoparallel: else no axes of a "
        "mesh are the ranks of either",
        "--training.seq_len": "a multiple of --parallelism.tensor_parallel_degree 4 with expert "
        "parallelism and --compile.autoparallel: each rank routes its part of the sequence",
    }


def test_refuses_demands_on_experts_of_a_model_without_any():
    for function, expected in (
        (llama3.llama3_debugmodel, ["--compile.autoparallel_solver.experts"]),
        (deepseek_v3.deepseek_v3_debugmodel, []),
    ):
        config = config_of(function)
        config.compile = dataclasses.replace(
            config.compile, autoparallel_solver=AutoParallelConfig(experts="own_tokens")
        )
        assert list(flags_of(config)) == expected


def with_flex_attention(**changes):
    from torchtitan.models.llama3 import config_registry

    config = config_of(llama3.llama3_debugmodel, **changes)
    config.model_spec = config_registry.llama3_debugmodel().model_spec
    return config


def test_a_model_that_attends_with_flex_attention_is_placed():
    assert flags_of(with_flex_attention()) == {}
    with intended_for("cuda"):
        assert flags_of(with_flex_attention()) == {}


def test_refuses_to_run_its_operator_eagerly_on_gpus():
    config = with_flex_attention()
    config.compile = dataclasses.replace(config.compile, mode="none")
    config.validator = dataclasses.replace(config.validator, enable=True)
    assert flags_of(config) == {}
    why = "a placed model's FlexAttention, run eagerly, makes all scores of all tokens"
    with intended_for("cuda"):
        assert flags_of(config) == {
            "--compile.mode": f"a captured mode with --compile.autoparallel: {why}",
            "--validator.enable": "False with --compile.autoparallel, since validation is eager: "
            + why,
        }


def test_refuses_varlen_attention():
    from torchtitan.models.common.attention import VarlenAttention

    config = with_flex_attention()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = VarlenAttention.Config()
    assert flags_of(config) == {
        "--compile.autoparallel": "False for a model that attends with VarlenAttention, which has "
        "no placement rule",
    }


def test_a_chunked_loss_is_applied_to_logits():
    config = config_of(llama3.llama3_debugmodel)
    assert isinstance(config.loss, GraphChunkedLoss.Config)
    of_logits = loss_of(config)
    assert isinstance(of_logits, LossOfLogits.Config)
    assert isinstance(of_logits.loss_fn, CrossEntropyLoss.Config)
    config.parallelism.tensor_parallel_degree = 2
    of_parts = loss_of(config)
    assert isinstance(of_parts, LossOfParts.Config)
    assert of_parts.loss_fn == of_logits
    config.compile = dataclasses.replace(config.compile, autoparallel=False)
    assert loss_of(config) is config.loss
