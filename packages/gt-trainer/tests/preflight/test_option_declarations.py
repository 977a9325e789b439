"""Every option of torchtitan's is declared, judged and read; one that would do nothing is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gt_config import Violation
from gt_trainer.command_line.command_line import UsageError, flags_given, parse_command_line
from gt_trainer.command_line.early_refusal import refuse_early
from gt_trainer.command_line.known_flags import flag_kinds, known_settings
from gt_trainer.models.published_runs import PUBLISHED_RUNS
from gt_trainer.preflight.option_declarations import OPTIONS, RunNumbers, option_of
from gt_trainer.preflight.plain_settings import TypedFlags, option_violations, topology_of_settings

KINDS = {
    flag: kind
    for flag, kind in flag_kinds().items()
    if not flag.startswith(("--compile.", "--help")) and ".no_" not in flag
}
"""What each flag of the help takes; --compile. options have a walk of their own."""

COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "--profiler.": {"--profiler.enable_profiling": True, "--profiler.enable_memory_snapshot": True},
    "--metrics.": {"--metrics.enable_tensorboard": True},
    "--dataloader.": {"--dataloader.num_workers": 1, "--dataloader.dataset_path": "text"},
    "--validator.": {
        "--validator.enable": True,
        "--validator.dataloader.num_workers": 1,
        "--validator.dataloader.dataset_path": "text",
    },
    "--lr_scheduler.": {"--lr_scheduler.decay_ratio": 0.5},
    "--checkpoint.": {
        "--checkpoint.initial_load_path": "/folder",
        "--checkpoint.last_save_model_only": True,
    },
    "--debug.": {"--debug.deterministic": True, "--compile.mode": "none"},
}
"""Options that others need, by the group of those."""

NEVER_READ = {
    "--validator.dataloader.infinite",
    "--debug.spmd_typechecking",
    "--debug.enable_structured_logging",
    "--loss.loss_fn.global_vocab_size",
}
"""Options that no run of gt-train reads."""

READERS = {
    "--hf_assets_path": ("torchtitan.trainer",),
    "--dump_folder": ("torchtitan.trainer",),
    "--profiler.": ("torchtitan.tools.profiler",),
    "--metrics.": ("torchtitan.components.metrics", "gt_trainer.metrics.metrics_jsonl"),
    "--dataloader.": ("gt_trainer.data.text_dataloader",),
    "--optimizer.": ("torchtitan.components.optimizer.optimizer",),
    "--lr_scheduler.": ("torchtitan.components.optimizer.lr_scheduler",),
    "--training.": (
        "torchtitan.trainer",
        "gt_trainer.trainer",
        "gt_trainer.placement.parallelize",
        "gt_trainer.preflight.placement_violations",
    ),
    "--parallelism.": (
        "torchtitan.models.llama3.model",
        "torchtitan.distributed.parallel_dims",
        "gt_trainer.preflight.placement_violations",
        "gt_trainer.pipelines.pipeline_plan",
        "gt_trainer.parallelism_options",
        "gt_trainer.trainer",
        "gt_trainer.preflight.placement_violations",
        "gt_trainer.preflight.preflight",
    ),
    "--checkpoint.": ("torchtitan.components.checkpointer.dcp", "torchtitan.trainer"),
    "--comm.": ("torchtitan.distributed.utils", "torchtitan.trainer"),
    "--validator.": ("torchtitan.components.validate", "torchtitan.trainer"),
    "--validator.dataloader.": ("gt_trainer.data.text_dataloader",),
    "--debug.": (
        "torchtitan.distributed.utils",
        "torchtitan.trainer",
        "torchtitan.models.common.moe",
        "torchtitan.models.common.decoder",
    ),
    "--override.": ("torchtitan.config.override",),
    "--loss.": ("gt_trainer.decoder.chunked_loss", "torchtitan.components.loss"),
    "--quantization.": (
        "gt_trainer.quantization.convert",
        "gt_trainer.quantization.products",
        "gt_trainer.preflight.quantization_violations",
        "gt_trainer.quantization.products",
        "gt_trainer.quantization.quantized_model",
    ),
}
"""Modules that read the options of a group; the longest prefix of a flag counts."""

KEYWORDS = "--optimizer.param_groups.N.optimizer_kwargs."
"""Arguments of PyTorch's optimizers, which torchtitan hands on without naming them."""

HUGE = str(10**30)
MEANINGFUL = {
    ("--checkpoint.keep_latest_k", "0"),
    ("--checkpoint.load_step", "-1"),
    ("--checkpoint.load_step", "0"),
    ("--dataloader.num_workers", "0"),
    ("--dataloader.seed", "-1"),
    ("--dataloader.seed", "0"),
    ("--dataloader.validation_fraction", "0"),
    ("--debug.seed", "0"),
    ("--lr_scheduler.decay_ratio", "0"),
    ("--lr_scheduler.min_lr_factor", "0"),
    ("--lr_scheduler.warmup_steps", "0"),
    ("--optimizer.param_groups.0.optimizer_kwargs.lr", "0"),
    ("--optimizer.param_groups.0.optimizer_kwargs.weight_decay", "0"),
    ("--parallelism.data_parallel_shard_degree", "-1"),
    ("--parallelism.pipeline_parallel_first_stage_less_layers", "0"),
    ("--parallelism.pipeline_parallel_last_stage_less_layers", "0"),
    ("--profiler.profiler_repeat", "0"),
    ("--profiler.profiler_skip_first", "0"),
    ("--profiler.profiler_skip_first_wait", "0"),
    ("--profiler.profiler_warmup", "0"),
    ("--training.global_batch_size", "-1"),
    ("--training.max_norm", "inf"),
    ("--training.max_norm", HUGE),
    ("--validator.dataloader.num_workers", "0"),
    ("--validator.dataloader.seed", "-1"),
    ("--validator.dataloader.seed", "0"),
    ("--validator.dataloader.validation_fraction", "0"),
    ("--validator.steps", "-1"),
}
"""Values that look senseless and have a meaning."""

EARLY = {
    "--validator.": ["--validator.enable"],
    "--profiler.": ["--profiler.enable_profiling", "--profiler.enable_memory_snapshot"],
    "--lr_scheduler.": ["--lr_scheduler.decay_ratio", "0.5"],
    "--parallelism.pipeline": ["--parallelism.pipeline_parallel_degree", "2"],
}
"""Flags that make an option of a group effective."""


def declared(flag: str) -> str:
    return flag.replace(".0.", ".N.")


def run_of(changes: Mapping[str, Any] = {}, *, world_size: int = 1) -> RunNumbers:
    known = known_settings("llama3_debugmodel")
    assert known is not None
    settings = {**known.values, **changes}
    return RunNumbers(
        settings=settings,
        topology=topology_of_settings(settings, world_size),
        model=known.model,
        device="cpu",
    )


def source_of(module: str) -> str:
    """The text of a module, which is not imported: torchtitan takes seconds."""
    package, _, rest = module.partition(".")
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    return Path(folder, *rest.split(".")).with_suffix(".py").read_text()


def idle(run: RunNumbers, flag: str) -> Iterator[Violation]:
    """The refusals of a flag as one that does nothing, if another value was configured."""
    typed = TypedFlags(names=frozenset({flag}), configured={flag: object()})
    for violation in option_violations(run, typed=typed):
        if violation.flag == flag and "would do nothing" in violation.allowed:
            yield violation


def test_every_flag_of_the_help_is_declared_and_no_other():
    assert {declared(flag) for flag in KINDS} == {*OPTIONS}


@pytest.mark.parametrize("flag", sorted(flag for flag in OPTIONS if OPTIONS[flag].needs))
def test_an_option_is_refused_where_nothing_reads_it_and_nowhere_else(flag):
    flag = flag.replace(".N.", ".0.")
    plain = run_of()
    if flag not in plain.settings:  # of text from elsewhere
        return
    group = max((each for each in COMPANIONS if flag.startswith(each)), key=len, default=None)
    company = {k: v for k, v in COMPANIONS.get(group, {}).items() if k != flag}
    degrees = [
        f"--parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context")
    ]
    busy = run_of(company | dict.fromkeys(degrees, 2), world_size=16)
    busy = replace(busy, model=replace(busy.model, num_experts=8), device="cuda")
    assert bool([*idle(busy, flag)]) == (flag in NEVER_READ)
    refused = {each for each in OPTIONS if [*idle(plain, each)]}
    # In the plain run, all but those whose needs it meets.
    met = all(need.is_met(plain) for need in option_of(flag).needs)
    assert (flag in refused) != met


def test_what_is_configured_or_typed_as_it_is_configured_is_not_refused():
    settings = run_of().settings
    typed = TypedFlags(names=frozenset(settings), configured=settings)
    assert [*option_violations(run_of(), typed=typed)] == []
    changed = run_of({"--metrics.save_tb_folder": "elsewhere"})
    assert [*option_violations(changed, typed=TypedFlags())] == []
    (violation,) = option_violations(changed, typed=typed)
    assert violation == Violation(
        flag="--metrics.save_tb_folder",
        value="elsewhere",
        allowed="its configured value 'tb', since --metrics.enable_tensorboard is False and it "
        "would do nothing",
        fix="drop the option, or use --metrics.enable_tensorboard",
    )


@pytest.mark.parametrize("flag", sorted({*OPTIONS} - NEVER_READ))
def test_an_option_is_read_where_it_is_said_to_be(flag):
    prefix = max((each for each in READERS if flag.startswith(each)), key=len)
    name = flag.removeprefix("--").rpartition(".")[2]
    sources = [*map(source_of, READERS[prefix])]
    assert flag.startswith(KEYWORDS) or any(
        f".{name}" in each or f'"{name}"' in each for each in sources
    )


def test_senseless_numbers_are_refused_before_anything_is_imported():
    left, told_otherwise = set(), set()
    for flag, kind in KINDS.items():
        values = ["nan", "inf", "-1", "0", HUGE] if "FLOAT" in kind and "[" not in kind else []
        values = ["-1", "0", HUGE, "-" + HUGE] if "INT" in kind and not values else values
        group = max((each for each in EARLY if flag.startswith(each)), key=len, default=None)
        company = [] if flag in EARLY.get(group, ()) else EARLY.get(group, [])
        for value in values:
            arguments = [*company, f"{flag}={value}"]
            try:
                refuse_early(parse_command_line(arguments), 2 if "pipeline" in flag else 1)
            except UsageError as error:
                if flag not in str(error):
                    told_otherwise.add((flag, value))
            else:
                left.add((flag, value))
    assert left - MEANINGFUL == set()
    assert all(flag.endswith("_degree") for flag, _ in told_otherwise)  # by the ranks they need


@pytest.mark.parametrize("name", PUBLISHED_RUNS)
def test_what_a_published_run_sets_is_not_refused(name):
    command = parse_command_line(["--published", name, "--dry-run"])
    refuse_early(command, PUBLISHED_RUNS[name].world_size)


def test_flags_of_a_published_run_are_not_the_users():
    command = parse_command_line(["--published", "llama3_8b_8_fsdp", "--metrics.log_freq", "2"])
    assert command.typed_flags == {"--metrics.log_freq"}
    assert command.typed_flags < flags_given(command.overrides)
