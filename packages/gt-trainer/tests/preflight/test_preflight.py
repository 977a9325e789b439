"""Everything that can be known to be wrong with a run, on a model small enough to judge fast."""

import dataclasses
import importlib
import math

import pytest
from refused_configurations import changed, refusal
from torchtitan.config import CommConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.config_utils import make_token_dispatcher_config
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.profiler import Profiler

from gt_config import ConfigError
from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.models import adapt, deepseek_v3, llama3
from gt_trainer.models.catalog import CATALOG, INTENDED_WORLD_SIZE
from gt_trainer.preflight.preflight import check_configuration, topology_of

EVERYTHING_WRONG = """\
the configuration has 13 problems:
  1. world size is 4
     allowed: dp_replicate 1 * dp_shard 2 * cp 1 * tp 3 * pp 2 = 12
     fix: start 12 processes, or change a degree
  2. --parallelism.expert_parallel_degree is 5
     allowed: a divisor of dp_shard 2 * cp 1 * tp 3 = 6
     fix: use one of 1, 2, 3, 6, or change the other degrees
  3. --training.seq_len is 250
     allowed: a multiple of 3 (tp 3)
     fix: use 252, or smaller degrees
  4. --training.steps is 0
     allowed: 1 or more
     fix: give 1 or more
  5. --training.global_batch_size is 20
     allowed: a multiple of 8 (local_batch_size 4 * dp_replicate 1 * dp_shard 2), or -1 for that
     fix: use 16, or leave the flag out
  6. --parallelism.tensor_parallel_degree is 3
     allowed: a divisor of the model's n_heads 16
     fix: use one of 1, 2, 4, 8, 16
  7. --parallelism.expert_parallel_degree is 5
     allowed: 1: the model has no experts
     fix: leave the flag out
  8. --training.seq_len is 250
     allowed: a multiple of 8, for the loss's equal chunks (--loss.num_chunks)
     fix: use 256, or --loss.num_chunks 5
  9. --parallelism.spmd_backend is 'full_dtensor'
     allowed: 'partial_dtensor', whose collectives a capture records
     fix: leave the flag out
  10. activation-checkpoint is 'FullAC.Config'
      allowed: none: recomputation is decided on the captured graph
      fix: choose activation-checkpoint:none, and see --compile.memory_policy
  11. --comm.mode is 'fake_backend'
      allowed: 'default'
      fix: to try a configuration without its machines, use --dry-run --world-size N
  12. --dump_folder is 'RUN'
      allowed: a folder that can be made and written
      fix: TMP/file is a file: choose another folder
  13. --hf_assets_path is '/no/such/folder'
      allowed: the folder of the model's tokenizer (tokenizer.json)
      fix: download the tokenizer from the model's page, and give its folder, or to try things out \
the one that is here, TOKENIZER"""


def test_the_debug_models_pass_in_the_layouts_they_are_for(tmp_path):
    check_configuration(changed(llama3.llama3_debugmodel(), tmp_path), 1)
    check_configuration(
        changed(
            llama3.llama3_debugmodel(),
            tmp_path / "not" / "made" / "yet",
            parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
        ),
        4,
        num_local_ranks=4,
    )
    assert not (tmp_path / "not").exists()
    check_configuration(
        changed(
            deepseek_v3.deepseek_v3_debugmodel(),
            tmp_path,
            parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
        ),
        4,
    )


@pytest.mark.parametrize("name", INTENDED_WORLD_SIZE)
def test_every_configuration_passes_at_the_world_size_it_is_meant_for(name, monkeypatch):
    monkeypatch.setattr(
        "gt_trainer.preflight.quantization_violations._torchao_problem", lambda: None
    )
    module = next(module for module, configs in CATALOG.items() if name in configs)
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    check_configuration(config, INTENDED_WORLD_SIZE[name], will_train=False)


def test_the_topology_takes_the_ranks_that_are_left_and_counts_accumulation(tmp_path):
    config = changed(
        llama3.llama3_debugmodel(),
        tmp_path,
        parallelism={"data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2},
        training={"local_batch_size": 3, "global_batch_size": 48},
    )
    topology = topology_of(config, 16)
    assert (topology.dp_replicate, topology.dp_shard, topology.tp) == (2, 4, 2)
    assert topology.gradient_accumulation_steps == 2


def test_everything_wrong_is_listed_at_once(tmp_path):
    (tmp_path / "file").touch()
    config = changed(
        llama3.llama3_debugmodel(),
        tmp_path / "file" / "run",
        parallelism={
            "data_parallel_shard_degree": 2,
            "tensor_parallel_degree": 3,
            "pipeline_parallel_degree": 2,
            "expert_parallel_degree": 5,
            "spmd_backend": "full_dtensor",
        },
        training={
            "steps": 0,
            "global_batch_size": 20,
            "seq_len": 250,
            "local_batch_size": 4,
        },
        activation_checkpoint=FullAC.Config(),
        comm=CommConfig(mode="fake_backend"),
        hf_assets_path="/no/such/folder",
    )
    text = refusal(config, 4).replace(str(tmp_path), "TMP")
    assert text.replace(str(shipped_tokenizer_path()), "TOKENIZER") == EVERYTHING_WRONG


def test_torchtitans_own_cuda_graphs_are_refused(tmp_path):
    config = changed(llama3.llama3_debugmodel(), tmp_path, training={"disable_cuda_graphs": False})
    assert refusal(config, 1) == (
        "the configuration has 1 problem:\n"
        "  1. --training.disable_cuda_graphs is False\n"
        "     allowed: True: torchtitan's own CUDA graphs do not know the captured step\n"
        "     fix: leave the flag out; --compile.cuda_graphs records the captured step"
    )


def test_a_dry_run_needs_no_files_and_no_devices(tmp_path):
    (tmp_path / "file").touch()
    config = changed(
        llama3.llama3_debugmodel(), tmp_path / "file", hf_assets_path="/no/such/folder"
    )
    check_configuration(config, 1, will_train=False)


def test_a_dry_run_is_of_captured_graphs(tmp_path):
    config = llama3.llama3_debugmodel()
    config.compile = dataclasses.replace(config.compile, mode="aot_joint")
    config.dump_folder = str(tmp_path)
    check_configuration(config, 1)
    with pytest.raises(ConfigError) as error:
        check_configuration(config, 1, will_train=False)
    assert str(error.value) == (
        "the configuration has 1 problem:\n"
        "  1. --compile.mode is 'aot_joint'\n"
        "     allowed: 'aot_fx_trace' in a dry run, which captures and simulates graphs\n"
        "     fix: leave the flag out of the dry run"
    )


def test_counts_of_what_is_switched_off_do_not_matter(tmp_path):
    config = changed(llama3.llama3_debugmodel(), tmp_path, validator={"freq": 0})
    check_configuration(config, 1)
    text = refusal(
        changed(
            llama3.llama3_debugmodel(),
            tmp_path,
            validator={"enable": True, "freq": 0},
            metrics={"log_freq": 0},
        ),
        1,
    )
    assert text == (
        "the configuration has 2 problems:\n"
        "  1. --metrics.log_freq is 0\n"
        "     allowed: 1 or more\n"
        "     fix: give 1 or more\n"
        "  2. --validator.freq is 0\n"
        "     allowed: 1 or more\n"
        "     fix: give 1 or more"
    )


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_learning_rates_are_finite_and_not_negative(tmp_path, value):
    config = llama3.llama3_debugmodel()
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = value
    assert refusal(changed(config, tmp_path), 1) == (
        "the configuration has 1 problem:\n"
        f"  1. --optimizer.param_groups.0.optimizer_kwargs.lr is {value}\n"
        "     allowed: a finite number, 0 or more and at most 1,000\n"
        "     fix: give one"
    )


def test_everything_that_would_turn_an_update_around_is_refused_and_its_absence_is_not(tmp_path):
    config = changed(
        llama3.llama3_debugmodel(),
        tmp_path,
        training={"max_norm": -1.0},
        lr_scheduler={"min_lr_factor": math.nan},
    )
    config.optimizer.param_groups[0].optimizer_kwargs["weight_decay"] = -0.1
    assert [line for line in refusal(config, 1).splitlines() if ". --" in line] == [
        "  1. --optimizer.param_groups.0.optimizer_kwargs.weight_decay is -0.1",
        "  2. --lr_scheduler.min_lr_factor is nan",
        "  3. --training.max_norm is -1.0",
    ]
    config = changed(llama3.llama3_debugmodel(), tmp_path, training={"max_norm": math.inf})
    config.optimizer.param_groups[0].optimizer_kwargs = {"lr": 0.0}
    check_configuration(config, 1)


def test_what_torchtitan_would_do_for_its_own_trainer_is_refused_by_name(tmp_path):
    text = refusal(
        changed(
            llama3.llama3_debugmodel(),
            tmp_path,
            checkpoint={"create_seed_checkpoint": True},
            profiler=Profiler.Config(enable_memory_snapshot=True),
        ),
        1,
    )
    assert text == (
        "the configuration has 2 problems:\n"
        "  1. --checkpoint.create_seed_checkpoint is True\n"
        "     allowed: False\n"
        "     fix: leave the flag out; to train from the same weights, set --debug.seed\n"
        "  2. --profiler.enable_memory_snapshot is True\n"
        "     allowed: False on cpu: the snapshot records the CUDA allocator\n"
        "     fix: leave the flag out"
    )


def test_a_sequence_that_the_losss_chunks_do_not_divide_is_refused(tmp_path):
    config = changed(llama3.llama3_debugmodel(), tmp_path, training={"seq_len": 100})
    expected = (
        "the configuration has 1 problem:\n"
        "  1. --training.seq_len is 100\n"
        "     allowed: a multiple of 8, for the loss's equal chunks (--loss.num_chunks)\n"
        "     fix: use 104, or --loss.num_chunks 5"
    )
    assert refusal(config, 1) == expected
    assert refusal(config, 1, will_train=False) == expected
    check_configuration(changed(config, tmp_path, loss={"num_chunks": 5}), 1)
    # A planned step applies the loss to whole logits.
    parallel = {"parallelism": {"data_parallel_shard_degree": 2}}
    check_configuration(changed(config, tmp_path, compile={"autoparallel": True}, **parallel), 2)


def test_ranks_that_share_a_sequence_each_need_the_losss_chunks(tmp_path):
    shared = {"parallelism": {"context_parallel_degree": 4}, "training": {"seq_len": 264}}
    assert refusal(changed(llama3.llama3_debugmodel(), tmp_path, **shared), 4) == (
        "the configuration has 1 problem:\n"
        "  1. --training.seq_len is 264\n"
        "     allowed: a multiple of 32, for the loss's equal chunks (--loss.num_chunks) on each of "
        "4 ranks that share it\n"
        "     fix: use 288, or --loss.num_chunks 6"
    )


def test_profiler_settings_that_would_fail_when_training_starts_are_refused(tmp_path):
    profiler = Profiler.Config(enable_profiling=True, profile_freq=3, profiler_repeat=-1)
    config = changed(llama3.llama3_debugmodel(), tmp_path, profiler=profiler)
    assert refusal(config, 1) == (
        "the configuration has 2 problems:\n"
        "  1. --profiler.profiler_repeat is -1\n"
        "     allowed: 0 or more\n"
        "     fix: give 0 or more\n"
        "  2. --profiler.profile_freq is 3\n"
        "     allowed: at least profiler_warmup 3 + profiler_active 1 = 4\n"
        "     fix: use 4, or smaller ones"
    )
    switched_off = dataclasses.replace(profiler, enable_profiling=False)
    check_configuration(changed(config, tmp_path, profiler=switched_off), 1)


def test_experts_and_positions_bound_the_degree_and_the_length(tmp_path):
    model = deepseek_v3.deepseek_v3_debugmodel()
    longest = model.model_spec.model.max_seq_len
    text = refusal(
        changed(
            model,
            tmp_path,
            parallelism={"data_parallel_shard_degree": 16, "expert_parallel_degree": 16},
            training={"seq_len": longest + 8},
        ),
        16,
    )
    assert text == (
        "the configuration has 2 problems:\n"
        f"  1. --training.seq_len is {longest + 8}\n"
        f"     allowed: at most {longest}, the longest that the model's positions reach\n"
        f"     fix: use {longest} or less\n"
        "  2. --parallelism.expert_parallel_degree is 16\n"
        "     allowed: a divisor of the model's 8 experts\n"
        "     fix: use one of 1, 2, 4, 8"
    )


def test_ep_overlap_without_expert_parallelism_is_refused(tmp_path):
    config = llama3.llama3_debugmodel()
    overlap = dataclasses.replace(config.compile.ep_overlap, enabled=True)
    text = refusal(changed(config, tmp_path, compile={"ep_overlap": overlap}), 1)
    assert "--compile.ep_overlap.enabled is True" in text
    assert "expert_parallel_degree" in text


def overlapping(tmp_path, *, training, **overlap):
    config = deepseek_v3.deepseek_v3_debugmodel()
    options = dataclasses.replace(config.compile.ep_overlap, enabled=True, **overlap)
    return changed(
        config,
        tmp_path,
        parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
        training=training,
        compile={"ep_overlap": options},
    )


@pytest.mark.parametrize("strategy", ["eager", "graph"])
@pytest.mark.parametrize("module_fqn", ["layers.*", "layers.*.moe"])
def test_both_strategies_of_ep_overlap_pass(tmp_path, strategy, module_fqn):
    training = {"local_batch_size": 2}
    config = overlapping(tmp_path, training=training, strategy=strategy, module_fqn=module_fqn)
    check_configuration(config, 4)


@pytest.mark.parametrize(
    ("strategy", "samples", "fix"),
    [
        ("eager", 1, "use 2"),
        ("eager", 3, "use 4"),
        ("graph", 1, "use 2"),
        ("graph", 3, "use 4, or --compile.ep_overlap.num_chunks 3"),
    ],
)
def test_samples_that_do_not_divide_into_chunks_are_refused(tmp_path, strategy, samples, fix):
    training = {"local_batch_size": samples}
    assert refusal(overlapping(tmp_path, training=training, strategy=strategy), 4) == (
        "the configuration has 1 problem:\n"
        f"  1. --training.local_batch_size is {samples}\n"
        "     allowed: a multiple of 2, for 2 equal chunks\n"
        f"     fix: {fix}"
    )


@pytest.mark.parametrize(
    ("root", "fix"),
    [
        ("layers.0.attention", "did you mean 'layers.*.moe'?"),
        ("layers.*.moe.experts", "did you mean 'layers.*.moe'?"),
        ("tok_embeddings", "give 'layers.*' or 'layers.*.moe'"),
    ],
)
def test_modules_that_cannot_run_in_chunks_are_refused_with_all_else_that_is_wrong(
    tmp_path, root, fix
):
    training = {"local_batch_size": 2}
    config = overlapping(tmp_path, training=training, module_fqn=root)
    config.compile = dataclasses.replace(config.compile, mode="none")
    assert refusal(config, 4) == (
        "the configuration has 2 problems:\n"
        f"  1. --compile.ep_overlap.module_fqn is {root!r}\n"
        "     allowed: 'layers.*' or 'layers.*.moe'\n"
        f"     fix: {fix}\n"
        "  2. --compile.ep_overlap.enabled is True\n"
        "     allowed: True only with --compile.mode aot_fx_trace: it orders one graph of "
        "forward and backward, and --compile.mode none has none\n"
        "     fix: use --compile.mode aot_fx_trace, or turn EP overlap off"
    )


@pytest.mark.parametrize("backend", ["hybridep", "minimal_async_ep"])
def test_exchanges_by_operators_that_ep_overlap_does_not_know_are_refused(tmp_path, backend):
    config = overlapping(tmp_path, training={"local_batch_size": 2}, module_fqn="layers.*")
    assert config.model_spec is not None
    for layer in config.model_spec.model.layers:
        if layer.moe is not None:
            exchange = layer.moe.routed_experts
            exchange.token_dispatcher = make_token_dispatcher_config(
                num_experts=8, top_k=3, comm_backend=backend
            )
    name = {"hybridep": "HybridEP", "minimal_async_ep": "MinimalAsyncEP"}[backend]
    assert refusal(config, 4) == (
        "the configuration has 1 problem:\n"
        "  1. --compile.ep_overlap.enabled is True\n"
        f"     allowed: False with {name}TokenDispatcher, of whose exchanges no launch and wait are "
        "known\n"
        "     fix: leave the flag out, or choose a --config whose experts exchange by all-to-all"
    )


def test_tokens_that_do_not_divide_into_chunks_are_refused(tmp_path):
    config = overlapping(
        tmp_path,
        training={"local_batch_size": 1, "seq_len": 63},
        strategy="eager",
        module_fqn="layers.*.moe",
        chunk_dim="seq",
    )
    assert refusal(config, 4) == (
        "the configuration has 2 problems:\n"
        "  1. --training.seq_len is 63\n"
        "     allowed: a multiple of 2, for 2 equal chunks\n"
        "     fix: use 64\n"
        "  2. --training.seq_len is 63\n"
        "     allowed: a multiple of 8, for the loss's equal chunks (--loss.num_chunks)\n"
        "     fix: use 64, or --loss.num_chunks 7"
    )


def test_the_newest_checkpoint_is_judged_too(tmp_path):
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-3" / ".metadata").write_bytes(b"")
    assert "--checkpoint.folder is 'RUN/checkpoint/step-3'" in refusal(
        changed(llama3.llama3_debugmodel(), tmp_path), 1
    )


def test_refuses_to_capture_attention_that_takes_another_shape_in_every_batch(
    tmp_path, monkeypatch
):
    # As on a GPU; on a CPU attention is replaced.
    monkeypatch.setattr(adapt, "replace_inner_attention", lambda model: ())
    published = config_registry.llama3_debugmodel_varlen_attn()
    config = adapt.adapt_debug(published, learning_rate=1e-3, batch_size=2)
    assert refusal(changed(config, tmp_path), 1) == (
        "the configuration has 1 problem:\n"
        "  1. --compile.mode is 'aot_fx_trace'\n"
        "     allowed: 'none' for a model that attends with VarlenAttention: it takes the offsets "
        "of the documents, of which every batch has another number, and a graph has fixed shapes\n"
        "     fix: choose a --config that attends with FlexAttention, or train eagerly"
    )
    check_configuration(changed(config, tmp_path, compile={"mode": "none"}), 1)
