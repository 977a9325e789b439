"""Everything that can be known to be wrong with a run before it starts, in one list.

torchtitan finds most of it too, one thing at a time, after every rank has started and imported, and
partly by ``assert``. Here the rules of gt-config (degrees, extents, compile options), of our
placement, and those about this machine (``machine_violations``) are judged together, in the
launching process, before any process group exists.

A rank may trust a configuration that has passed.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
)

from gt_config import ConfigError, SavedOpSelector, Topology, Violation
from gt_config.selectors import is_inside
from gt_passes import known_passes
from gt_trainer.decoder.expert_layers import expert_layers
from gt_trainer.device import intended_device_type
from gt_trainer.models.hugging_face.causal_model import CausalModel
from gt_trainer.preflight.machine_violations import machine_violations
from gt_trainer.preflight.option_declarations import ModelNumbers, RunNumbers
from gt_trainer.preflight.pass_options import RunOptions, bitwise_violations, pass_violations
from gt_trainer.preflight.pipeline_violations import pipeline_violations
from gt_trainer.preflight.placement_violations import (
    autoparallel_violations,
    context_parallel_violations,
    unsupported_placement,
)
from gt_trainer.preflight.plain_settings import (
    NOTHING_TYPED,
    TypedFlags,
    plain_violations,
    settings_of,
    topology_of_settings,
)
from gt_trainer.preflight.plan_file_violations import model_on_meta, plan_file_violations
from gt_trainer.preflight.quantization_violations import (
    quantization_violations,
    torchao_violations,
    untraceable_violations,
)
from gt_trainer.trainer import GraphTrainer


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
    settings, model = settings_of(config), model_numbers_of(config)
    device = intended_device_type()
    run = RunNumbers(settings=settings, topology=topology, model=model, device=device)
    plain = [*plain_violations(config.compile, run, passes=known_passes(), typed=typed)]
    yield from plain
    told = {violation.flag for violation in plain}
    recipes = RunOptions(
        options=config.compile,
        topology=topology,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
    )
    idle = pass_violations(recipes, asked=typed.names)
    yield from (each for each in idle if each.flag not in told)
    yield from bitwise_violations(config.compile, topology)
    yield from quantization_violations(config)
    yield from unsupported_placement(
        config.parallelism, config.training, activation_checkpoint=config.activation_checkpoint
    )
    yield from _unsupported_options(config)
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
            fix="leave the flag out; --compile.cuda_graphs records the captured step",
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
            fix="leave the flag out; to train from the same weights, set --debug.seed",
        )
    if config.profiler.enable_memory_snapshot and intended_device_type() == "cpu":
        yield Violation(
            flag="--profiler.enable_memory_snapshot",
            value=True,
            allowed="False on cpu: the snapshot records the CUDA allocator",
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
            fix="leave the flag out, or choose a --config whose experts exchange by all-to-all",
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


# A memory budget that no plan can keep, found before any rank starts or anything is captured.
#
# However a solver places a model, its parameters, their gradients and the optimizer's state are
# there in the backward, at best cut over all ranks. What activations take besides, only the
# solver can say.
_GIB = 2**30


def budget_violations(config: GraphTrainer.Config, topology: Topology) -> Iterator[Violation]:
    """Yield at most one violation: a budget below what the state of training takes.

    Args:
        config: of a run with which nothing else is wrong: its model is built, on meta.
        topology: its extents.
    """
    gib = config.compile.autoparallel_solver.memory_budget_gib
    if not config.compile.autoparallel or gib is None:
        return
    # Imported here: no other run pays for the solver.
    from gt_autoparallel import PlacementRequest

    parameters = list(model_on_meta(config).parameters())
    state = sum(each.nbytes for each in parameters) * (
        1 + PlacementRequest().optimizer_state_copies
    )
    gradients = sum(each.nbytes for each in parameters if each.requires_grad)
    least = (state + gradients) / topology.world
    if gib * _GIB >= least:
        return
    yield Violation(
        flag="--compile.autoparallel_solver.memory_budget_gib",
        value=gib,
        allowed=f"at least {math.ceil(1000 * least / _GIB) / 1000:.3f} on {topology.world} ranks: "
        "so much do parameters, gradients and optimizer state take, cut over all of them, without "
        "any activation",
        fix="allow more, or use more ranks",
    )


# Options that a model of transformers' cannot be combined with, each by name.
_ALLOWED = "with a model of transformers'"


def hugging_face_violations(config: Any, topology: Topology) -> Iterator[Violation]:
    """Yield what is wrong with a run of such a model; nothing for another one.

    Args:
        config: a ``GraphTrainer.Config``.
        topology: extents of the run.
    """
    model = config.model_spec.model if config.model_spec is not None else None
    if not isinstance(model, CausalModel.Config):
        return
    for axis, extent, reason in (
        ("tensor_parallel", topology.tp, "it says of no weight how ranks would share it"),
        ("context_parallel", topology.cp, "its attention is its own, and knows whole sequences"),
        ("expert_parallel", topology.ep, "no experts of it are known"),
        ("pipeline_parallel", topology.pp, "its forward is not cut into stages here"),
    ):
        if extent > 1:
            yield Violation(
                flag=f"--parallelism.{axis}_degree",
                value=extent,
                allowed=f"1 {_ALLOWED}: {reason}",
                fix="use data_parallel_shard_degree or data_parallel_replicate_degree",
            )
    if config.compile.autoparallel:
        yield Violation(
            flag="--compile.autoparallel",
            value=True,
            allowed=f"False {_ALLOWED}: the solver's parts are those of torchtitan's decoders",
        )
    if config.quantization:
        yield Violation(
            flag="--quantization",
            value="given",
            allowed=f"none {_ALLOWED}: its layers are none of torchtitan's, which are quantized",
        )
    if config.training.seq_len > model.max_seq_len:
        yield Violation(
            flag="--training.seq_len",
            value=config.training.seq_len,
            allowed=f"at most {model.max_seq_len}, the model's max_position_embeddings",
            fix=f"use {model.max_seq_len} or less",
        )


# Options that name parts of the model, and name none of this one.
_EVERY_PARAMETER = ".*"
_PATTERNS = "--optimizer.param_groups"
_SAVED_OPS = "--compile.full_recompute_saved_ops"


def model_name_violations(config: Any) -> Iterator[Violation]:
    """Yield the names that match nothing; builds the model without memory if there are any names.

    Args:
        config: a ``GraphTrainer.Config`` that is sound otherwise.
    """
    patterns = [group.pattern for group in config.optimizer.param_groups]
    saved_ops = config.compile.full_recompute_saved_ops
    if config.model_spec is None or (patterns == [_EVERY_PARAMETER] and not saved_ops):
        return
    with torch.device("meta"):
        model = config.model_spec.model.build()
    yield from _patterns_of_no_parameter(patterns, model)
    yield from _operators_of_no_module(saved_ops, model)


def _patterns_of_no_parameter(patterns: list[str], model: nn.Module) -> Iterator[Violation]:
    """Give each parameter to the first pattern that is found in its name, as torchtitan does."""
    left = [name for name, each in model.named_parameters() if each.requires_grad]
    for index, pattern in enumerate(patterns):
        matched = [name for name in left if re.search(pattern, name)]
        if not matched:
            yield Violation(
                flag=f"{_PATTERNS}.{index}.pattern",
                value=pattern,
                allowed="a pattern that is found in the name of a parameter that no pattern before "
                f"it has: {', '.join(left[:3]) or 'none is left'}, ...",
                fix="correct it, or drop its group",
            )
        left = [name for name in left if name not in matched]
    if left:
        yield Violation(
            flag=f"{_PATTERNS}.{len(patterns) - 1}.pattern" if patterns else _PATTERNS,
            value=patterns[-1] if patterns else [],
            allowed=f"patterns that reach every parameter, and none reaches {left[0]} and "
            f"{len(left) - 1} others",
            fix=f"let the last pattern be {_EVERY_PARAMETER!r}",
        )


def _operators_of_no_module(saved_ops: tuple[str, ...], model: nn.Module) -> Iterator[Violation]:
    modules = [name for name, _ in model.named_modules()]
    for text in saved_ops:
        selector = SavedOpSelector.parse(text)
        namespace, _, name = selector.op.partition(".")
        operator: Any = getattr(torch.ops, namespace)
        try:
            for part in name.split("."):
                operator = getattr(operator, part)
        except AttributeError:
            yield Violation(
                flag=_SAVED_OPS,
                value=text,
                allowed=f"an operator of PyTorch after '::', and there is no {selector.op}",
                fix="correct or drop it",
            )
        if not any(is_inside(each, selector.module_pattern) for each in modules):
            shown = [each for each in modules if each.startswith("layers.0.")][:3]
            yield Violation(
                flag=_SAVED_OPS,
                value=text,
                allowed=f"a pattern of module names before '::', such as {', '.join(shown)}",
                fix="correct or drop it",
            )


# Weights in Hugging Face's form, judged before they are trained: torchtitan's adapters pass over
# names that they do not know, and the file that is left lacks them.
_EXPORT = "--checkpoint.last_save_in_hf"


def export_violations(config: Any) -> Iterator[Violation]:
    """Yield what the last save would lose, if it is to be in Hugging Face's form.

    Args:
        config: a ``GraphTrainer.Config``.
    """
    spec = config.model_spec
    if not config.checkpoint.last_save_in_hf or not config.checkpoint.enable or spec is None:
        return
    if spec.state_dict_adapter is None:
        yield Violation(
            flag=_EXPORT,
            value=True,
            allowed=f"False for {spec.name}, which has no state_dict_adapter",
        )
        return
    with torch.device("meta"):
        model = spec.model.build()
    buffers = {name for name, _ in model.named_buffers()}
    state = {name: value for name, value in model.state_dict().items() if name not in buffers}
    adapter = spec.state_dict_adapter(spec.model, None)
    lost = sorted(state.keys() - adapter.from_hf(adapter.to_hf(state)).keys())
    if lost:
        yield Violation(
            flag=_EXPORT,
            value=True,
            allowed=f"False for {spec.name} {spec.flavor}: torchtitan's "
            f"{type(adapter).__name__} leaves out {len(lost)} of its {len(state)} parameters, "
            f"{lost[0]} among them",
        )
