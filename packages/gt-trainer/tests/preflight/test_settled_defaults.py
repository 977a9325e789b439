"""Defaults of a device give way to what a user chose, say why, and are refused where asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch.fx import Node
from torchtitan.models.llama3 import config_registry

from gt_config import AutoParallelConfig, ConfigError, EpOverlapConfig, Topology
from gt_passes import MemoryPolicyPass, register_pass, registry
from gt_trainer.device import intended_for
from gt_trainer.models import deepseek_v3, llama3, qwen3
from gt_trainer.models.adapt import adapt_published
from gt_trainer.preflight.pass_options import bitwise_violations
from gt_trainer.preflight.preflight import check_configuration, configuration_violations
from gt_trainer.preflight.settled_defaults import describe_run, settle_defaults, settled_by_hand
from gt_trainer.quantization.quantization_options import QuantizationConfig
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
        (deepseek_v3.deepseek_v3_671b, "full_recompute"),  # what is published does not fit
    ],
)
def test_on_a_gpu_recomputation_is_as_published_where_that_fits(function, policy):
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
            "approximate (compile-regions)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLayersOfNoNumber(MemoryPolicyPass):
    name: ClassVar[str] = "keep-layers-of-no-number"

    def keeps(self, node: Node) -> bool:
        return False


def test_a_memory_policy_of_ones_own_takes_the_place_of_the_default(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    register_pass(KeepLayersOfNoNumber)
    with intended_for("cuda"):
        config, lines = settled(llama3.llama3_8b(), passes=(KeepLayersOfNoNumber.name,))
        assert lines == (
            (
                "--compile.memory_policy selective gives way: keep-layers-of-no-number is the "
                "memory policy"
            ),
        )
        assert describe_run(config, 8).startswith(
            "On cuda: activations kept as keep-layers-of-no-number says, "
        )
        asked = settled(
            llama3.llama3_8b(),
            8,
            "--compile.memory_policy",
            memory_policy="selective",
            passes=(KeepLayersOfNoNumber.name,),
        )
        with pytest.raises(ConfigError, match="are memory policies, and a graph has one"):
            check_configuration(asked[0], 8, will_train=False)


def test_a_solver_takes_the_memory_policy_back_and_the_run_by_hand_keeps_it():
    solver = AutoParallelConfig(memory_budget_gib=40.0)
    with intended_for("cuda"):
        published = llama3.llama3_8b()
        options = replace(published.compile, autoparallel=True, autoparallel_solver=solver)
        config = replace(published, compile=options)
        planned, lines = settle_defaults(config, 8)
        assert lines[0] == (
            "--compile.memory_policy selective gives way: the plan says what the backward computes "
            "and gathers again"
        )
        assert planned.compile.memory_policy == "save_all"
        by_hand = settled_by_hand(config, 8)
        assert by_hand is not None
        assert by_hand.compile == published.compile
        assert settled_by_hand(published, 8) is None
        asked, _ = settle_defaults(config, 8, asked=["--compile.memory_policy"])
    assert asked.compile.memory_policy == "selective"


def test_a_solver_takes_the_overlap_of_a_configuration_back_unless_it_was_asked_for():
    published = deepseek_v3.deepseek_v3_671b_pp()
    config = replace(published, compile=replace(published.compile, autoparallel=True))
    planned, lines = settle_defaults(config, 2048)
    assert lines == (
        (
            "--compile.ep_overlap.enabled True gives way: whether a step can run in chunks depends on "
            "its plan; ask for it to try"
        ),
    )
    assert not planned.compile.ep_overlap.enabled
    by_hand = settled_by_hand(config, 2048)
    assert by_hand is not None
    assert by_hand.compile.ep_overlap == published.compile.ep_overlap
    asked, lines = settle_defaults(config, 2048, asked=["--compile.ep_overlap.enabled"])
    assert asked.compile.ep_overlap.enabled
    assert lines == ()


def test_an_exchange_of_tokens_takes_cuda_graphs_back_unless_they_were_asked_for():
    with intended_for("cuda"):
        config = deepseek_v3.deepseek_v3_16b()
        taken_back, lines = settled(config, 32)
        kept, none = settled(config, 32, "--compile.cuda_graphs")
        planned, _ = settled(config, 32, autoparallel=True)
    assert not taken_back.compile.cuda_graphs
    (line,) = lines
    assert line == (
        "--compile.cuda_graphs True gives way: how many tokens ranks exchange is known on the "
        "device alone"
    )
    assert kept.compile.cuda_graphs
    assert none == ()
    assert planned.compile.cuda_graphs  # a plan may leave tokens where they are


def test_microbatches_that_reduce_once_take_cuda_graphs_back_until_a_gpu_has_replayed_them():
    with intended_for("cuda"):
        config = llama3.llama3_8b()
        config.training.global_batch_size = 2 * 8 * config.training.local_batch_size
        taken_back, lines = settled(config, 8, accumulation="reduce_once")
        kept, _ = settled(config, 8, "--compile.cuda_graphs", accumulation="reduce_once")
    assert not taken_back.compile.cuda_graphs
    assert lines[-1] == (
        "--compile.cuda_graphs True gives way: no GPU has replayed a step of several microbatches "
        "yet"
    )
    assert kept.compile.cuda_graphs


def test_a_pipeline_takes_cuda_graphs_back_until_gpus_that_exchange_have_replayed_one():
    with intended_for("cuda"):
        config = llama3.llama3_8b()
        config.parallelism = replace(config.parallelism, pipeline_parallel_degree=2)
        taken_back, lines = settled(config, 8)
        kept, _ = settled(config, 8, "--compile.cuda_graphs")
    assert not taken_back.compile.cuda_graphs
    assert (
        "--compile.cuda_graphs True gives way: of pipelines only two stages on one GPU have been "
        "replayed"
    ) in lines
    assert kept.compile.cuda_graphs


def test_bitwise_takes_compilation_back_and_refuses_it_where_asked_for():
    with intended_for("cuda"):
        config, lines = settled(llama3.llama3_8b(), bitwise=True)
        assert config.compile.inductor_compilation == "none"
        assert config.compile.cuda_graphs
        (line,) = lines
        assert line == (
            "--compile.inductor_compilation regional gives way: allowed is 'none' with "
            "--compile.bitwise: compile-regions is approximate"
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
        assert list(configuration_violations(config, 8)) == []
        assert describe_run(config, 8) == "On cuda: eager"
    assert len(lines) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"inductor_compilation": "regional", "passes": ("compile-regions",)},
        {"inductor_compilation": "full", "passes": ("compile-whole-graph",)},
        {"numerics_changing": True, "passes": ("fuse-parallel-matmuls",)},
        {"async_tensor_parallel": True, "passes": ("async-tensor-parallel",)},
        {"autoparallel": True},
    ],
)
def test_whatever_rounds_is_refused_with_bitwise_also_where_two_options_ask_for_it(options):
    compile_config = replace(llama3.llama3_debugmodel().compile, bitwise=True, **options)
    topology = Topology(world=4, dp_shard=2, tp=2, batch_size=2, seq_len=128)
    flags = {violation.flag for violation in bitwise_violations(compile_config, topology)}
    assert flags == {f"--compile.{option}" for option in options}


def test_gradients_that_chunks_sum_before_the_capture_are_refused_with_bitwise():
    overlap = EpOverlapConfig(enabled=True, strategy="eager")
    compile_config = replace(
        deepseek_v3.deepseek_v3_debugmodel().compile, bitwise=True, ep_overlap=overlap
    )
    topology = Topology(world=4, dp_shard=4, ep=2, batch_size=2, seq_len=128)
    (violation,) = bitwise_violations(compile_config, topology)
    assert violation.flag == "--compile.ep_overlap.enabled"


def test_one_reduction_of_several_microbatches_is_said_and_refused_with_bitwise():
    config = llama3.llama3_debugmodel()
    config = replace(
        config,
        compile=replace(config.compile, accumulation="reduce_once"),
        parallelism=replace(config.parallelism, data_parallel_shard_degree=2),
        training=replace(config.training, local_batch_size=1, global_batch_size=4),
    )
    assert list(configuration_violations(config, 2)) == []
    assert describe_run(config, 2).endswith("reordered (one reduction of several microbatches)")
    config = replace(config, compile=replace(config.compile, bitwise=True))
    (violation,) = configuration_violations(config, 2)
    assert str(violation) == (
        "--compile.accumulation is 'reduce_once'\n"
        "allowed: 'every_microbatch' with --compile.bitwise: one reduction of several microbatches "
        "is reordered\n"
        "fix: leave out one of the two"
    )


def test_one_reduction_of_a_pipeline_is_said_and_refused_with_bitwise():
    config = llama3.llama3_debugmodel()
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=2,
        context_parallel_degree=2,
        pipeline_parallel_schedule="1F1B",
    )
    config = replace(config, parallelism=parallelism)
    reordered = "reordered (one reduction of all microbatches of a pipeline)"
    assert describe_run(config, 4).endswith(reordered)
    config = replace(config, compile=replace(config.compile, bitwise=True))
    (violation,) = configuration_violations(config, 4)
    assert str(violation) == (
        "--parallelism.pipeline_parallel_degree is 2\n"
        "allowed: 1 with --compile.bitwise: one reduction of all microbatches of a pipeline is "
        "reordered\n"
        "fix: leave out one of the two"
    )
    alone = replace(parallelism, context_parallel_degree=1)
    assert list(configuration_violations(replace(config, parallelism=alone), 2)) == []


def test_the_line_says_what_runs_and_not_what_was_asked_for():
    with intended_for("cuda"):
        names = ("cuda-graphs", "compile-regions", "recompute-tagged")
        config = llama3.llama3_8b()
        config = replace(config, compile=replace(config.compile, disable_passes=names))
        assert describe_run(config, 8) == (
            "On cuda: activations kept, nothing compiled, no CUDA graphs, bitwise as eager"
        )


def test_the_line_says_of_which_eager_run_a_pipeline_has_the_bits():
    config = llama3.llama3_debugmodel()
    config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_degree=2))
    described = describe_run(config, 2)
    assert described.endswith("no CUDA graphs, bitwise as eager, gradients reduced once")


def test_the_line_says_that_stages_sum_the_uses_of_a_tied_weight_apart():
    config = qwen3.qwen3_debugmodel()
    assert describe_run(config, 1).endswith("bitwise as eager")
    config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_degree=2))
    assert describe_run(config, 2).endswith(
        "bitwise as eager, gradients reduced once, a tied weight's by stage first"
    )


def test_the_line_says_the_class_that_is_farthest_from_eager_and_what_has_it():
    config = llama3.llama3_8b()
    chunks = replace(config.compile, async_tensor_parallel=True)
    tensor_parallel = replace(config.parallelism, tensor_parallel_degree=2)
    config = replace(config, compile=chunks, parallelism=tensor_parallel)
    assert describe_run(config, 8).endswith(", reordered (async-tensor-parallel)")
    both = replace(chunks, inductor_compilation="regional", regional_modules=("layers.*.ffn_norm",))
    described = describe_run(replace(config, compile=both), 8)
    assert described.endswith(", approximate (compile-regions)")


def test_a_dry_run_of_an_eager_run_is_refused():
    with intended_for("cuda"):
        config, _ = settled(llama3.llama3_8b(), mode="none")
        with pytest.raises(ConfigError, match="'aot_fx_trace' in a dry run"):
            check_configuration(config, 8, will_train=False)


def test_a_published_precision_that_is_turned_off_takes_its_choice_of_layers_along():
    config = llama3.llama3_405b()
    config.quantization.linears = "none"
    settled, lines = settle_defaults(config, 1024, asked=["--quantization.linears"])
    assert (settled.quantization, lines) == (QuantizationConfig(), ())
    kept, _ = settle_defaults(config, 1024, asked=["--quantization.skip"])
    assert kept.quantization.skip == ("lm_head",)


def test_a_published_precision_gives_way_to_a_solver_unless_it_is_asked_for():
    config = llama3.llama3_405b()
    config.compile = replace(config.compile, autoparallel=True)
    settled, lines = settle_defaults(config, 1024)
    assert settled.quantization == QuantizationConfig()
    assert lines[0].startswith("--quantization.linears float8_rowwise gives way: a scale is a max")
    by_hand = settled_by_hand(config, 1024)
    assert by_hand.quantization == QuantizationConfig()
    asked, _ = settle_defaults(config, 1024, asked=["--quantization.linears"])
    assert asked.quantization == config.quantization


def test_products_in_8_bits_make_a_run_approximate(tmp_path):
    config = llama3.llama3_debugmodel()
    config.quantization = QuantizationConfig(linears="float8_rowwise", emulate=True)
    assert describe_run(config, 1).endswith("approximate (products in 8 bits)")
