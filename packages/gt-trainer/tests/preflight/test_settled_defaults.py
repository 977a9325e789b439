"""Defaults of a device give way to what a user chose, say why, and are refused where asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torchtitan.models.llama3 import config_registry

from gt_config import ConfigError
from gt_trainer.device import intended_for
from gt_trainer.models import deepseek_v3, llama3, qwen3
from gt_trainer.models.adapt import adapt_published
from gt_trainer.preflight.preflight import check_configuration
from gt_trainer.preflight.settled_defaults import describe_run, settle_defaults
from gt_trainer.trainer import GraphTrainer


def settled(config: GraphTrainer.Config, world_size: int = 8, *asked: str, **options):
    config = replace(config, compile=replace(config.compile, **options))
    return settle_defaults(config, world_size, asked=asked)


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (llama3.llama3_8b, "selective"),
        (llama3.llama3_70b, "full_recompute"),
        (llama3.llama3_405b, "full_recompute"),
        (qwen3.qwen3_14b, "full_recompute"),
        (deepseek_v3.deepseek_v3_16b, "selective"),
        (deepseek_v3.deepseek_v3_671b, "selective"),
    ],
)
def test_on_a_gpu_recomputation_is_as_published(function, policy):
    with intended_for("cuda"):
        options = function().compile
    assert options.memory_policy == policy
    assert options.inductor_compilation == "regional"
    assert options.cuda_graphs


def test_nothing_published_means_nothing_recomputed():
    published = replace(config_registry.llama3_8b(), activation_checkpoint=None)
    with intended_for("cuda"):
        assert adapt_published(published).compile.memory_policy == "save_all"


def test_on_a_cpu_nothing_is_set_and_nothing_gives_way():
    config, lines = settled(llama3.llama3_8b())
    assert (config.compile, lines) == (llama3.llama3_8b().compile, ())
    assert config.compile.memory_policy == "save_all"
    assert describe_run(config, 8) == (
        "On cpu: activations kept, nothing compiled, no CUDA graphs, bitwise as eager"
    )


def test_what_a_gpu_does_stands_in_one_line():
    with intended_for("cuda"):
        config, lines = settled(llama3.llama3_8b())
        assert lines == ()
        assert describe_run(config, 8) == (
            "On cuda: cheap activations recomputed, Inductor for what memory bounds, CUDA graphs, "
            "rounds otherwise than eager (compile-regions)"
        )


def test_an_exchange_of_tokens_takes_cuda_graphs_back_unless_they_were_asked_for():
    with intended_for("cuda"):
        config = deepseek_v3.deepseek_v3_16b()
        taken_back, lines = settled(config, 32)
        kept, none = settled(config, 32, "--compile.cuda_graphs")
    assert not taken_back.compile.cuda_graphs
    (line,) = lines
    assert line == (
        "--compile.cuda_graphs True gives way: how many tokens ranks exchange is known on the "
        "device alone"
    )
    assert kept.compile.cuda_graphs
    assert none == ()


def test_bitwise_takes_compilation_back_and_refuses_it_where_asked_for():
    with intended_for("cuda"):
        config, lines = settled(llama3.llama3_8b(), bitwise=True)
        assert config.compile.inductor_compilation == "none"
        assert config.compile.cuda_graphs
        (line,) = lines
        assert line == (
            "--compile.inductor_compilation regional gives way: allowed is 'none' with "
            "--compile.bitwise: compile-regions rounds otherwise"
        )
        assert describe_run(config, 8).endswith("bitwise as eager")
        check_configuration(config, 8, will_train=False)
        asked, _ = settled(llama3.llama3_8b(), 8, "--compile.inductor_compilation", bitwise=True)
        with pytest.raises(ConfigError) as refused:
            check_configuration(asked, 8, will_train=False)
    (violation,) = refused.value.violations
    assert violation.flag == "--compile.inductor_compilation"
    assert violation.fix == "leave out one of the two"


def test_an_eager_run_takes_everything_back():
    with intended_for("cuda"):
        config, lines = settled(llama3.llama3_8b(), mode="none")
        check_configuration(config, 8, will_train=False)
    assert len(lines) == 3
    assert describe_run(config, 8) == "On cpu: eager"
