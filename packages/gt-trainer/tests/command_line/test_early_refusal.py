"""What is refused before torch is imported is what the full check would refuse as well."""

import pytest

from gt_config.option_paths import option_at, option_paths
from gt_trainer import device
from gt_trainer.command_line.command_line import UsageError, flags_given, parse_command_line
from gt_trainer.command_line.early_refusal import refuse_early
from gt_trainer.command_line.known_flags import known_settings, typed_values
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.models.catalog import CATALOG, INTENDED_WORLD_SIZE
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.preflight.plain_settings import TypedFlags, settings_of
from gt_trainer.preflight.preflight import configuration_violations
from gt_trainer.preflight.settled_defaults import settle_defaults

WRONG = [
    ["--training.steps", "-3"],
    ["--training.global_batch_size=7"],
    ["--training.max_norm", "nan", "--metrics.log_freq", "0"],
    ["--optimizer.param_groups.0.optimizer_kwargs.lr", "-1e-4"],
    ["--parallelism.tensor_parallel_degree", "3"],
    ["--parallelism.expert_parallel_degree", "2", "--training.seq_len", "1000000"],
    ["--loss.num_chunks", "7"],
    ["--compile.passes", "bucket-all-gathers,nonsense"],
    ["--compile.ep_overlap.enabled", "--compile.ep_overlap.num_chunks", "1"],
    ["--compile.offload_host_gib", "-1"],
    ["--compile.mode", "aot_joint", "--compile.memory_policy", "selective"],
    ["--validator.freq", "0"],
    ["--validator.enable", "--validator.freq", "0"],
    ["--optimizer.param_groups.0.optimizer_kwargs.betas", "2", "3", "--debug.seed", "-1"],
    ["--lr_scheduler.decay_ratio", "nan", "--lr_scheduler.total_steps", "3"],
    ["--checkpoint.no_enable", "--checkpoint.interval", "7", "--metrics.save_tb_folder", "x"],
    ["--compile.prefetch-layers=-1", "--parallelism.data_parallel_shard_degree", "0"],
]

SOUND = [
    [],
    ["--compile.mode", "none"],
    ["--compile.mode", "aot_joint"],
    ["--training.steps", "0", "--training.steps", "3"],
    ["--checkpoint.interval", "20", "--validator.freq", "10"],  # as it is configured
    ["--compile.passes", "canonicalize-views"],
    ["--compile.no_verify_passes", "--compile.regional_modules", "layers.*.feed_forward"],
]


def early_text(arguments, world_size=1):
    with pytest.raises(UsageError) as refused:
        refuse_early(parse_command_line(arguments), world_size)
    return str(refused.value)


@pytest.mark.parametrize("intended", ["cpu", "cuda"])
@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_is_refused_early_is_refused_by_the_full_check(arguments, intended):
    with device.intended_for(intended):
        config = llama3_debugmodel()
        typed = TypedFlags(names=flags_given(arguments), configured=settings_of(config))
        config = apply_overrides(config, arguments)
        config, _ = settle_defaults(config, 2, asked=flags_given(arguments))
        in_full = [str(each) for each in configuration_violations(config, 2, typed=typed)]
    told = early_text(arguments, 2).replace("\n     ", "\n")
    early = [text for text in in_full if text in told]
    assert f"the configuration has {len(early)} problem" in told
    assert early


@pytest.mark.parametrize("arguments", SOUND, ids=" ".join)
def test_what_may_be_sound_is_left_for_the_full_check(arguments):
    refuse_early(parse_command_line(arguments), 1)


@pytest.mark.parametrize("config", [name for family in CATALOG.values() for name in family])
def test_no_configuration_of_the_catalog_is_refused_where_it_is_meant_to_run(config):
    for placed in ([], ["--compile.autoparallel"]):
        command = parse_command_line(["--config", config, *placed])
        refuse_early(command, INTENDED_WORLD_SIZE.get(config, 1))


def test_overlap_of_eager_calls_is_refused_with_a_solver():
    given = ["--config", "deepseek_v3_671b_pp", "--compile.autoparallel"]
    found = early_text([*given, "--compile.ep_overlap.strategy", "eager"], 2048)
    assert "--compile.ep_overlap.strategy is 'eager'\n     allowed: 'graph' with" in found


def test_the_message_names_everything_and_says_what_was_not_looked_at_yet():
    assert early_text(["--training.steps", "0", "--compile.offload_host_gib", "-1"]) == (
        "the configuration has 2 problems:\n"
        "  1. --compile.offload_host_gib is -1.0\n"
        "     allowed: None, or a number above 0, at most 1e9\n"
        "     fix: give None, or a number above 0, at most 1e9\n"
        "  2. --training.steps is 0\n"
        "     allowed: 1 or more\n"
        "     fix: give 1 or more\n"
        "Found before anything was imported. What depends on the machine, files and graphs is "
        "checked\nonce this is right."
    )


@pytest.mark.parametrize("arguments", [*WRONG, *SOUND], ids=" ".join)
def test_typed_values_are_read_as_tyro_reads_them(arguments):
    def settings(config):
        options = {
            f"--compile.{path}": option_at(config.compile, path)
            for path in option_paths(TrainerCompileConfig)
        }
        return settings_of(config) | options

    default = settings(llama3_debugmodel())
    typed = {flag: value for flag, value in typed_values(arguments).items() if flag in default}
    assert typed.keys() == {flag for flag in flags_given(arguments) if flag in default}
    # By their text: not a number is equal to nothing.
    changed = settings(apply_overrides(llama3_debugmodel(), arguments))
    assert {k: repr(v) for k, v in (default | typed).items()} == {
        k: repr(v) for k, v in changed.items()
    }


def test_every_option_of_ours_is_among_the_known_settings():
    known = known_settings("llama3_debugmodel")
    expected = {f"--compile.{path}" for path in option_paths(TrainerCompileConfig)}
    assert expected <= known.values.keys()


def test_modules_of_the_users_and_other_torchtitans_are_not_judged(monkeypatch):
    wrong = ["--training.steps", "0"]
    refuse_early(parse_command_line(["--module", "my.models", "--config", "tiny", *wrong]), 1)
    command = parse_command_line(wrong)
    monkeypatch.setattr("gt_trainer.command_line.known_flags._table", lambda: None)
    refuse_early(command, 1)
