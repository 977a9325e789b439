"""Values that each option of torchtitan's configuration may have, and what of a run reads it.

The fields of torchtitan's dataclasses are not ours, so that their declarations are in one table, by
flag. ``--compile.`` options are declared in gt-config. Everything here is plain data without torch,
for the command line to judge before it imports anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gt_config import Topology

Settings = Mapping[str, Any]
"""Values by flag, as ``--training.steps``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """Numbers of a decoder that the degrees of a run must divide, or must not exceed."""

    heads: Mapping[str, int]
    """Heads of its attention, as the model's configuration names them: n_heads, n_kv_heads."""
    max_seq_len: int
    """Tokens that its positions reach."""
    num_experts: int | None
    """Routed experts of the layer that has fewest; None without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """What decides whether a run reads an option."""

    settings: Settings
    topology: Topology
    model: ModelNumbers | None
    """None where the model is not judged."""
    device: str | None = None
    """cpu or cuda; None where the device is not known yet."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something without which an option does nothing."""

    is_met: Callable[[RunNumbers], bool]
    because: str
    """The reason if it is not met, as ``--profiler.enable_profiling is False``."""
    fix: str
    """What makes the option effective, as ``use --profiler.enable_profiling``; empty if nothing."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that an option may have."""

    accepts: Callable[[Any], bool]
    text: str
    """The values in words."""
    fix: str = "give one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of one option."""

    values: Allowed | None = None
    """None if every value that its type has is allowed, or another rule judges them."""
    needs: tuple[Need, ...] = ()
    """Empty if every run reads the option."""


LARGEST_COUNT = 2**31 - 1
_LARGEST_SEED = 2**63 - 1
_LARGEST_RATE = 1000
"""Far beyond what trains: a step with it ends in no numbers."""


def _count(least: int, *, also: tuple[int | None, ...] = (), words: str = "") -> Allowed:
    """Whole numbers from ``least`` on; beyond 31 bits they overflow what they are given to."""
    text = f"{words}{least} or more"
    return Allowed(
        lambda value: value in also or (isinstance(value, int) and least <= value <= LARGEST_COUNT),
        text,
        f"give {text}",
    )


def _number(accepts: Callable[[float], bool], text: str) -> Allowed:
    return Allowed(
        lambda value: value is None or bool(math.isfinite(value) and accepts(value)),
        f"a finite number, {text}",
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except re.error:
        return False
    return True


_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")
_OPTIMIZERS = ("Adam", "AdamW")

_POSITIVE = _count(1)
_NOT_NEGATIVE = _count(0)
_RATE = Allowed(
    lambda value: math.isfinite(value) and 0 <= value <= _LARGEST_RATE,
    f"a finite number, 0 or more and at most {_LARGEST_RATE:,}",
)
_TEXT = Allowed(_is_text, "a name that is not empty")
_SEED = Allowed(
    lambda value: value is None or 0 <= value <= _LARGEST_SEED,
    "from 0 to 2**63 - 1",
    "give a smaller number, 0 or more",
)
_SMALL_INT = Allowed(lambda value: abs(value) <= LARGEST_COUNT, "a number of 31 bits")
_AT_MOST = replace(_SMALL_INT, accepts=lambda value: value <= LARGEST_COUNT)


def _on(flag: str) -> Need:
    return Need(lambda run: bool(run.settings.get(flag, True)), f"{flag} is False", f"use {flag}")


def _off(flag: str) -> Need:
    return Need(lambda run: not run.settings.get(flag, False), f"{flag} is True", f"drop {flag}")


def _given(flag: str, what: str) -> Need:
    return Need(
        lambda run: flag not in run.settings or bool(run.settings[flag]),
        f"{flag} is not given",
        f"use {flag} {what}",
    )


def _not_given(flag: str) -> Need:
    return Need(lambda run: not run.settings.get(flag), f"{flag} says it", f"drop {flag}")


def _degree(kind: str, is_met: Callable[[Topology], bool]) -> Need:
    flag = f"--parallelism.{kind}_parallel_degree"
    return Need(lambda run: is_met(run.topology), f"{flag} is 1", f"use {flag} 2 or more")


def _never(because: str) -> Need:
    return Need(lambda run: False, because, "")


def _needs(*needs: Need, values: Allowed | None = None) -> Option:
    return Option(values=values, needs=needs)


_PROFILER = Need(
    lambda run: bool(run.settings["--profiler.enable_profiling"]),
    "--profiler.enable_profiling is False",
    "use --profiler.enable_profiling",
)
_SNAPSHOTS = _on("--profiler.enable_memory_snapshot")
_PROFILES = Need(
    lambda run: any(
        run.settings.get(f"--profiler.enable_{each}", True)
        for each in ("profiling", "memory_snapshot")
    ),
    _PROFILER.because,
    _PROFILER.fix,
)
_A_CYCLE = Need(
    lambda run: (
        run.settings["--profiler.profile_freq"] <= run.settings["--training.steps"]
        or run.settings["--profiler.profile_freq"] < 1
    ),
    "--profiler.profile_freq is more than --training.steps and no cycle ends",
    "use a smaller --profiler.profile_freq",
)
_TENSORBOARD = _on("--metrics.enable_tensorboard")
_LOGGERS = Need(
    lambda run: any(
        run.settings.get(f"--metrics.enable_{each}", True) for each in ("tensorboard", "wandb")
    ),
    "neither TensorBoard nor Weights & Biases is used",
    "use --metrics.enable_tensorboard or --metrics.enable_wandb",
)
_SEVERAL_RANKS = Need(
    lambda run: run.topology.world > 1, "one rank communicates with no other", "use more processes"
)
_GPU = Need(lambda run: run.device != "cpu", "the run is on cpu", "use a GPU")
_FLIGHT_RECORDER = Need(
    lambda run: run.settings.get("--comm.trace_buf_size", 1) != 0,
    "--comm.trace_buf_size is 0",
    "use a larger one",
)
_PIPELINE = _degree("pipeline", lambda topology: topology.pp > 1)
_TENSOR_PARALLEL = _degree("tensor", lambda topology: topology.tp > 1)
_CONTEXT_PARALLEL = _degree("context", lambda topology: topology.cp > 1)
_STAGES_BY_COUNT = _not_given("--parallelism.module_fqns_per_model_part")
_NAMED_SCHEDULE = _not_given("--parallelism.pipeline_parallel_schedule_csv")
_CHECKPOINTS = _on("--checkpoint.enable")
_SAVES = _off("--checkpoint.load_only")
_INITIAL = _given("--checkpoint.initial_load_path", "FOLDER")
_MODEL_ALONE_SAVED = _on("--checkpoint.last_save_model_only")
_VALIDATION = _on("--validator.enable")
_EXPERTS = Need(
    lambda run: run.model is None or run.model.num_experts is not None,
    "the model has no experts",
    "choose a --config that has",
)
_EAGER = Need(
    lambda run: run.settings.get("--compile.mode", "none") == "none",
    "a captured step has no autograd when it runs",
    "use --compile.mode none",
)
_NO_PLAN = _off("--compile.autoparallel")


def _scheduled_steps(run: RunNumbers) -> int:
    return int(run.settings["--lr_scheduler.total_steps"] or run.settings["--training.steps"])


def _decays(run: RunNumbers) -> bool:
    ratio, steps = run.settings["--lr_scheduler.decay_ratio"], _scheduled_steps(run)
    if ratio is None:
        return bool(steps > run.settings["--lr_scheduler.warmup_steps"])
    return not math.isfinite(ratio) or round(steps * ratio) != 0


_DECAY = Need(
    _decays,
    "--lr_scheduler.decay_ratio leaves no step to decay in",
    "use a larger --lr_scheduler.decay_ratio",
)
_A_LONGER_SCHEDULE = Need(
    lambda run: (
        _decays(run)
        or run.settings["--lr_scheduler.warmup_steps"] > run.settings["--training.steps"]
        or _scheduled_steps(run) < run.settings["--training.steps"]
    ),
    "--lr_scheduler.decay_ratio leaves the rate as it is after the warm-up",
    "use a larger --lr_scheduler.decay_ratio",
)


def _of_dataloader(section: str, *needs: Need) -> dict[str, Option]:
    """Options of the text of one section, ``--dataloader`` or ``--validator.dataloader``."""
    workers = Need(
        lambda run: run.settings.get(f"{section}.num_workers", 1) != 0,
        f"{section}.num_workers is 0",
        f"use {section}.num_workers 1",
    )
    path = _given(f"{section}.dataset_path", "FOLDER")
    is_own = Need(
        lambda run: run.settings.get(f"{section}.dataset") != "stdlib" or path.is_met(run),
        path.because,
        path.fix,
    )
    options = {
        "dataset": Option(),  # machine_violations
        "dataset_path": Option(
            values=replace(_TEXT, accepts=lambda value: value is None or _is_text(value))
        ),
        "num_workers": Option(values=_NOT_NEGATIVE),
        "persistent_workers": _needs(workers),
        "pin_memory": _needs(_GPU),
        "prefetch_factor": _needs(workers, values=_count(1, also=(None,))),
        "text_field": _needs(is_own, values=_TEXT),
        "split": Option(),
        "validation_fraction": Option(
            values=_number(lambda value: 0 <= value < 1, "0 or more and less than 1")
        ),
        "infinite": Option(),
        "seed": Option(values=_SMALL_INT),
    }
    return {
        f"{section}.{name}": replace(option, needs=(*needs, *option.needs))
        for name, option in options.items()
    }


_SECTIONS = {
    "--profiler.": "enable_memory_snapshot",
    "--metrics.": "enable_tensorboard disable_color_printing enable_wandb jsonl display",
    "--optimizer.": "implementation",
    "--training.": "seq_len enable_cpu_offload disable_cuda_graphs dtype mixed_precision_param "
    "mixed_precision_reduce gc_debug",
    "--parallelism.": "data_parallel_replicate_degree data_parallel_shard_degree "
    "fsdp_reshard_after_forward enable_fsdp_symm_mem tensor_parallel_degree spmd_backend "
    "pipeline_parallel_degree context_parallel_degree context_parallel_load_balancer "
    "context_parallel_ptrr_mask_key expert_parallel_degree pipeline_parallel_balance",
    "--checkpoint.": "enable create_seed_checkpoint",
    "--comm.": "mode",
    "--validator.": "enable",
    "--debug.": "deterministic batch_invariant print_config",
    "--override.": "imports",
    "--quantization.": "linears experts only skip emulate",
}
_JUDGED_ELSEWHERE = (
    "--hf_assets_path",
    *(f"{section}{name}" for section, names in _SECTIONS.items() for name in names.split()),
)
"""Options with any value of their type, or that gt-config and other modules here judge."""

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        **{flag: Option() for flag in _JUDGED_ELSEWHERE},
        "--dump_folder": Option(values=_TEXT),
        "--profiler.enable_profiling": _needs(_A_CYCLE),
        "--profiler.save_traces_folder": _needs(_PROFILER, values=_TEXT),
        "--profiler.profile_freq": _needs(_PROFILES, values=_POSITIVE),
        "--profiler.profiler_repeat": _needs(_PROFILER, values=_count(0, also=(None,))),
        "--profiler.profiler_skip_first": _needs(_PROFILER, values=_count(0, also=(None,))),
        "--profiler.profiler_skip_first_wait": _needs(_PROFILER, values=_count(0, also=(None,))),
        "--profiler.profiler_active": _needs(_PROFILER, values=_POSITIVE),
        "--profiler.profiler_warmup": _needs(_PROFILER, values=_NOT_NEGATIVE),
        "--profiler.memory_snapshot_freq": _needs(_SNAPSHOTS, values=_count(1, also=(None,))),
        "--profiler.save_memory_snapshot_folder": _needs(_SNAPSHOTS, values=_TEXT),
        "--profiler.memory_snapshot_max_entries": _needs(_SNAPSHOTS, values=_POSITIVE),
        "--metrics.log_freq": Option(values=_POSITIVE),
        "--metrics.save_tb_folder": _needs(_TENSORBOARD, values=_TEXT),
        "--metrics.save_for_all_ranks": _needs(_LOGGERS, _SEVERAL_RANKS),
        **_of_dataloader("--dataloader"),
        "--optimizer.param_groups.N.pattern": Option(
            values=Allowed(_is_pattern, "a regular expression of Python", "correct it")
        ),
        "--optimizer.param_groups.N.optimizer_name": Option(
            values=Allowed(
                lambda value: value in _OPTIMIZERS,
                " or ".join(map(repr, _OPTIMIZERS)),
                "use one of them",
            )
        ),
        "--optimizer.param_groups.N.optimizer_kwargs.lr": Option(values=_RATE),
        "--optimizer.param_groups.N.optimizer_kwargs.betas": Option(
            values=Allowed(
                lambda value: len(value) == 2 and all(0 <= each < 1 for each in value),
                "two numbers, each 0 or more and less than 1",
                "give two, such as 0.9 0.95",
            )
        ),
        "--optimizer.param_groups.N.optimizer_kwargs.eps": Option(
            values=_number(lambda value: 0 < value <= 1, "above 0 and at most 1")
        ),
        "--optimizer.param_groups.N.optimizer_kwargs.weight_decay": Option(values=_RATE),
        "--lr_scheduler.warmup_steps": Option(values=_NOT_NEGATIVE),
        "--lr_scheduler.total_steps": _needs(_A_LONGER_SCHEDULE, values=_count(1, also=(None,))),
        "--lr_scheduler.decay_ratio": Option(
            values=_number(lambda value: 0 <= value <= 1, "from 0 to 1")
        ),
        "--lr_scheduler.decay_type": _needs(_DECAY),
        "--lr_scheduler.min_lr_factor": _needs(
            _DECAY, values=_number(lambda value: 0 <= value <= 1, "from 0 to 1")
        ),
        "--training.local_batch_size": Option(values=_AT_MOST),  # gt-config: at least
        "--training.global_batch_size": Option(  # plain_settings
            values=_AT_MOST
        ),
        "--training.max_norm": Option(
            values=Allowed(
                lambda value: value > 0,
                "above 0: gradients would all be 0",
                "give a larger number, or inf to clip nothing",
            )
        ),
        "--training.steps": Option(values=_POSITIVE),
        "--training.gc_freq": Option(values=_POSITIVE),
        "--parallelism.enable_sequence_parallel": _needs(_TENSOR_PARALLEL),
        "--parallelism.module_fqns_per_model_part": _needs(_PIPELINE),
        "--parallelism.pipeline_parallel_first_stage_less_layers": _needs(
            _PIPELINE, _STAGES_BY_COUNT, values=_NOT_NEGATIVE
        ),
        "--parallelism.pipeline_parallel_last_stage_less_layers": _needs(
            _PIPELINE, _STAGES_BY_COUNT, values=_NOT_NEGATIVE
        ),
        "--parallelism.pipeline_parallel_layers_per_stage": _needs(
            _PIPELINE, _STAGES_BY_COUNT, _NAMED_SCHEDULE, values=_count(1, also=(None,))
        ),
        "--parallelism.pipeline_parallel_schedule": _needs(_PIPELINE, _NAMED_SCHEDULE),
        "--parallelism.pipeline_parallel_schedule_csv": _needs(_PIPELINE),
        "--parallelism.pipeline_parallel_microbatch_size": _needs(_PIPELINE, values=_AT_MOST),
        "--checkpoint.folder": _needs(_CHECKPOINTS, values=_TEXT),
        "--checkpoint.interval": _needs(_CHECKPOINTS, _SAVES, values=_POSITIVE),
        "--checkpoint.initial_load_path": _needs(_CHECKPOINTS),
        "--checkpoint.initial_load_model_only": _needs(_CHECKPOINTS, _INITIAL),
        "--checkpoint.initial_load_in_hf": _needs(_CHECKPOINTS),  # its path: machine_violations
        "--checkpoint.initial_load_in_hf_quantized": _needs(_CHECKPOINTS, _INITIAL),
        "--checkpoint.last_save_model_only": _needs(_CHECKPOINTS, _SAVES),
        "--checkpoint.last_save_in_hf": _needs(_CHECKPOINTS, _SAVES),
        "--checkpoint.export_dtype": _needs(_CHECKPOINTS, _SAVES, _MODEL_ALONE_SAVED),
        "--checkpoint.keep_latest_k": _needs(
            _CHECKPOINTS, _SAVES, values=_count(2, also=(0,), words="0, to keep all, or ")
        ),
        "--checkpoint.load_step": _needs(
            _CHECKPOINTS, values=_count(0, also=(-1,), words="-1, for the newest, or ")
        ),
        "--checkpoint.exclude_from_loading": _needs(
            _CHECKPOINTS,
            values=Allowed(
                lambda value: set(value) <= {*_STATES},
                f"names of {', '.join(_STATES)}",
                "correct or drop it",
            ),
        ),
        "--checkpoint.enable_first_step_checkpoint": _needs(_CHECKPOINTS, _SAVES),
        "--checkpoint.load_only": _needs(_CHECKPOINTS),
        "--checkpoint.async_mode": _needs(_CHECKPOINTS, _SAVES),
        "--comm.init_timeout_seconds": _needs(_SEVERAL_RANKS, values=_POSITIVE),
        "--comm.train_timeout_seconds": _needs(_SEVERAL_RANKS, values=_POSITIVE),
        "--comm.trace_buf_size": _needs(_SEVERAL_RANKS, _GPU, values=_NOT_NEGATIVE),
        "--comm.save_traces_folder": _needs(_SEVERAL_RANKS, _GPU, _FLIGHT_RECORDER, values=_TEXT),
        "--comm.save_traces_file_prefix": _needs(_SEVERAL_RANKS, _GPU, _FLIGHT_RECORDER),
        "--validator.freq": _needs(_VALIDATION, values=_POSITIVE),
        "--validator.steps": _needs(
            _VALIDATION, values=_count(1, also=(-1,), words="-1, for the whole split, or ")
        ),
        **_of_dataloader("--validator.dataloader", _VALIDATION),
        "--validator.dataloader.infinite": _needs(
            _VALIDATION, _never("--validator.steps says whether the text begins again")
        ),
        "--debug.seed": Option(values=_SEED),
        "--debug.spmd_typechecking": _needs(
            _never("it checks --parallelism.spmd_backend spmd_types, which is not used here")
        ),
        "--debug.deterministic_warn_only": _needs(_on("--debug.deterministic")),
        "--debug.moe_force_load_balance": _needs(_EXPERTS),
        "--debug.detect_anomaly": _needs(_EAGER),
        "--debug.save_config_file": Option(
            values=replace(_TEXT, accepts=lambda value: value is None or _is_text(value))
        ),
        "--debug.enable_structured_logging": _needs(
            _never("gt-train writes metrics.jsonl and begins no such log")
        ),
        "--loss.num_chunks": _needs(_NO_PLAN),  # its values: plain_settings
        "--loss.loss_fn.global_vocab_size": _needs(
            _never("losses split by vocabulary need --parallelism.spmd_backend spmd_types")
        ),
    }
)
"""Declarations by flag; ``N`` is the number of an item. Comments name other rules that judge it."""


def option_of(flag: str) -> Option | None:
    """Return the declaration of a flag, None if it has none.

    Args:
        flag: As ``--optimizer.param_groups.0.pattern``.
    """
    return OPTIONS.get(re.sub(r"\.\d+(?=\.)", ".N", flag))
