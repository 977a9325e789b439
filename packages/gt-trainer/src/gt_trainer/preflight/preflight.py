"""Everything that can be known to be wrong with a run before it starts, in one list.

torchtitan finds most of it too, one thing at a time, after every rank has started and imported, and
partly by ``assert``. Here the rules of gt-config (degrees, extents, compile options), of our
placement, and those about this machine (``machine_violations``) are judged together, in the
launching process, before any process group exists.

A rank may trust a configuration that has passed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
)

from gt_config import ConfigError, Topology, Violation, find_violations
from gt_passes import known_passes
from gt_trainer.decoder.expert_layers import expert_layers
from gt_trainer.device import intended_device_type
from gt_trainer.preflight.bitwise_violations import bitwise_violations
from gt_trainer.preflight.budget_violations import budget_violations
from gt_trainer.preflight.context_parallel_violations import context_parallel_violations
from gt_trainer.preflight.export_violations import export_violations
from gt_trainer.preflight.hugging_face_violations import hugging_face_violations
from gt_trainer.preflight.idle_options import idle_option_violations
from gt_trainer.preflight.machine_violations import machine_violations
from gt_trainer.preflight.model_name_violations import model_name_violations
from gt_trainer.preflight.option_declarations import ModelNumbers, RunNumbers
from gt_trainer.preflight.pipeline_violations import pipeline_violations
from gt_trainer.preflight.placement_violations import (
    autoparallel_violations,
    unsupported_placement,
)
from gt_trainer.preflight.plain_settings import (
    NOTHING_TYPED,
    TypedFlags,
    number_violations,
    option_violations,
    settings_of,
    topology_of_settings,
)
from gt_trainer.preflight.plan_file_violations import plan_file_violations
from gt_trainer.preflight.quantization_violations import (
    quantization_violations,
    torchao_violations,
    untraceable_violations,
)
from gt_trainer.trainer import GraphTrainer

_LEAVE_OUT = "leave the flag out"


def check_configuration(
    config: GraphTrainer.Config,
    world_size: int,
    *,
    num_local_ranks: int | None = None,
    will_train: bool = True,
    typed: TypedFlags = NOTHING_TYPED,
) -> None:
    """Refuse a run that cannot work.

    Args:
        config: The finished configuration. Not changed.
        world_size: Ranks of the whole job.
        num_local_ranks: Ranks that will share this machine's devices; None if unknown.
        will_train: Whether it will read and write files; False for a dry run.
        typed: What the user typed: these flags are refused where they would do nothing.

    Raises:
        ConfigError: Lists everything that is wrong.
    """
    violations = list(configuration_violations(config, world_size, typed=typed))
    topology = topology_of(config, world_size)
    violations += torchao_violations(config)
    if will_train:
        violations += machine_violations(config, topology, num_local_ranks=num_local_ranks)
        violations += export_violations(config)
    else:
        violations += _not_dry_run(config)
        violations += untraceable_violations(config)
    if not violations:  # for these build the model
        violations += model_name_violations(config)
        violations += plan_file_violations(config, topology)
        violations += budget_violations(config, topology)
    if violations:
        raise ConfigError(violations)


def configuration_violations(
    config: GraphTrainer.Config, world_size: int, *, typed: TypedFlags = NOTHING_TYPED
) -> Iterator[Violation]:
    """Yield everything that is wrong with a run, whatever the machine is.

    Args:
        config: The finished configuration. Not changed.
        world_size: Ranks of the whole job.
        typed: As for ``check_configuration``.
    """
    topology = topology_of(config, world_size)
    violations = find_violations(config.compile, topology, known_passes=known_passes())
    yield from violations
    told = {violation.flag for violation in violations}
    idle = idle_option_violations(
        config.compile,
        topology,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        asked=typed.names,
    )
    # gt-config refuses some of these too, and knows better why.
    yield from (each for each in idle if each.flag not in told)
    yield from bitwise_violations(config.compile, topology)
    yield from quantization_violations(config)
    yield from unsupported_placement(
        config.parallelism, config.training, activation_checkpoint=config.activation_checkpoint
    )
    yield from _unsupported_options(config)
    settings, model = settings_of(config), model_numbers_of(config)
    yield from option_violations(
        RunNumbers(
            settings=settings, topology=topology, model=model, device=intended_device_type()
        ),
        typed=typed,
    )
    yield from number_violations(settings, topology, model=model)
    yield from _unsound_profiler(config)
    yield from _unknown_overrides(config)
    yield from _exchanges_of_unknown_operators(config)
    yield from _shapes_of_documents(config)
    yield from pipeline_violations(config)
    yield from context_parallel_violations(config, topology)
    yield from autoparallel_violations(config, topology)
    yield from hugging_face_violations(config, topology)


def topology_of(config: GraphTrainer.Config, world_size: int) -> Topology:
    """Return the extents of a run; ``topology_of_settings`` says how they are derived.

    Args:
        config: The finished configuration.
        world_size: Ranks of the whole job.
    """
    return topology_of_settings(settings_of(config), world_size)


def _unsupported_options(config: GraphTrainer.Config) -> Iterator[Violation]:
    if not config.training.disable_cuda_graphs:
        yield Violation(
            flag="--training.disable_cuda_graphs",
            value=False,
            allowed="True: torchtitan's own CUDA graphs do not know the captured step",
            fix=f"{_LEAVE_OUT}; --compile.cuda_graphs records the captured step",
        )
    if config.comm.mode != "default":
        yield Violation(
            flag="--comm.mode",
            value=config.comm.mode,
            allowed="'default'",
            fix="to try a configuration without its machines, use --dry-run --world-size N",
        )
    if config.checkpoint.create_seed_checkpoint:
        yield Violation(
            flag="--checkpoint.create_seed_checkpoint",
            value=True,
            allowed="False",
            fix=f"{_LEAVE_OUT}; to train from the same weights, set --debug.seed",
        )
    if config.profiler.enable_memory_snapshot and intended_device_type() == "cpu":
        yield Violation(
            flag="--profiler.enable_memory_snapshot",
            value=True,
            allowed="False on cpu: the snapshot records the CUDA allocator",
            fix=_LEAVE_OUT,
        )


def _not_dry_run(config: GraphTrainer.Config) -> Iterator[Violation]:
    if config.compile.mode != "aot_fx_trace":
        yield Violation(
            flag="--compile.mode",
            value=config.compile.mode,
            allowed="'aot_fx_trace' in a dry run, which captures and simulates graphs",
            fix="leave the flag out of the dry run",
        )


def model_numbers_of(config: GraphTrainer.Config) -> ModelNumbers | None:
    """Return the numbers of a configuration's model that degrees must divide; None of no decoder.

    Args:
        config: The finished configuration.
    """
    model = config.model_spec.model if config.model_spec is not None else None
    if not isinstance(model, Decoder.Config):
        return None
    attention = model.first_attention
    heads = {name: getattr(attention, name, None) for name in ("n_heads", "n_kv_heads")}
    return ModelNumbers(
        heads={name: number for name, number in heads.items() if number is not None},
        max_seq_len=model.max_seq_len,
        num_experts=min((moe.num_experts for moe in expert_layers(model)), default=None),
    )


def _exchanges_of_unknown_operators(config: GraphTrainer.Config) -> Iterator[Violation]:
    """EP overlap schedules exchanges whose launch and wait it knows, and would else do nothing."""
    model = config.model_spec.model if config.model_spec is not None else None
    if not config.compile.ep_overlap.enabled or not isinstance(model, Decoder.Config):
        return
    moes = expert_layers(model)
    for dispatcher in (moe.routed_experts.token_dispatcher for moe in moes):
        if not isinstance(dispatcher, BaseEPTokenDispatcher.Config):
            continue
        if isinstance(dispatcher, AllToAllTokenDispatcher.Config):
            continue
        name = type(dispatcher).__qualname__.removesuffix(".Config")
        yield Violation(
            flag="--compile.ep_overlap.enabled",
            value=True,
            allowed=f"False with {name}, of whose exchanges no launch and wait are known",
            fix=f"{_LEAVE_OUT}, or choose a --config whose experts exchange by all-to-all",
        )
        return


def _shapes_of_documents(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Varlen attention takes the offsets of documents: another shape in every batch."""
    model = config.model_spec.model if config.model_spec is not None else None
    if config.compile.mode == "none" or not isinstance(model, Decoder.Config):
        return
    if any(model.traverse(VarlenAttention.Config)):
        yield Violation(
            flag="--compile.mode",
            value=config.compile.mode,
            allowed="'none' for a model that attends with VarlenAttention: it takes the offsets of "
            "the documents, of which every batch has another number, and a graph has fixed shapes",
            fix="choose a --config that attends with FlexAttention, or train eagerly",
        )


def _unknown_overrides(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Import what the run would import, and look for the functions that are named."""
    # torchtitan has no public name for what was registered.
    registered = vars(importlib.import_module("torchtitan.config.override"))["_REGISTRY"]
    for entry in config.override.imports:
        target = entry if isinstance(entry, str) else entry[0]
        module, _, function = target.rpartition(".")
        why = f"module {module!r} has no override of that name"
        try:
            found = getattr(importlib.import_module(module), function, None) if module else None
        except Exception as error:  # noqa: BLE001  # a module that fails to load raises anything
            found, why = None, f"{type(error).__name__}: {error}"
        if found is None or target not in registered:
            yield Violation(
                flag="--override.imports",
                value=target,
                allowed="the path MODULE.FUNCTION of a function with torchtitan's @override",
                fix=f"correct it ({why})",
            )


def _unsound_profiler(config: GraphTrainer.Config) -> Iterator[Violation]:
    """When training starts, torchtitan refuses this by ``assert``."""
    profiler = config.profiler
    cycle = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < cycle:
        yield Violation(
            flag="--profiler.profile_freq",
            value=profiler.profile_freq,
            allowed=f"at least profiler_warmup {profiler.profiler_warmup} + profiler_active "
            f"{profiler.profiler_active} = {cycle}",
            fix=f"use {cycle}, or smaller ones",
        )
