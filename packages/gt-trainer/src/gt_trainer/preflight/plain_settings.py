"""Degrees, extents, counts and rates: what of a run is judged as plain numbers, without torch.

Settings are values by the flag that sets them. Preflight reads them off a configuration, and the
command line off a table and what was typed (``command_line.early_refusal``), so that both judge by
the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gt_config import CompileConfig, Topology, Violation, find_violations, malformed_options
from gt_config.idle_options import idle, idle_options, what_lacks
from gt_config.option_paths import default_option, with_option
from gt_config.readers import NeededValue, Readers
from gt_trainer.preflight.option_declarations import (
    OPTIONS,
    ModelNumbers,
    RunNumbers,
    Settings,
    option_of,
)

_PARALLELISM = "--parallelism."
_RESHARD = "--parallelism.fsdp_reshard_after_forward"
_RESHARDING = Readers(
    needs=(
        NeededValue(path="config.mode", values=("aot_fx_trace",)),
        NeededValue(path="config.accumulation", values=("every_microbatch",)),
        NeededValue(path="topology.pp", values=(1,)),
    ),
    axes=("dp_shard", "cp"),
)
"""When something reads that option of torchtitan's."""
_TRAINING = "--training."
_NUM_CHUNKS = "--loss.num_chunks"
_OF_THIS_MACHINE = ("--hf_assets_path", "--override.imports")
_ABSENT: Any = object()


def settings_of(config: object) -> dict[str, Any]:
    """Return what the functions of this module read of a configuration.

    Args:
        config: A ``torchtitan.trainer.Trainer.Config``, named by no type since this module knows no
            torchtitan.
    """
    flags = [flag for flag in OPTIONS if flag not in _OF_THIS_MACHINE]
    settings: dict[str, Any] = {}
    for flag in (*flags, "--compile.mode", "--compile.autoparallel"):
        group, item, name = flag.partition(".N.")
        items = _value_at(config, group) if item else _ABSENT
        indices = range(0 if items is _ABSENT else len(items)) if item else (None,)
        for index in indices:
            own = flag if index is None else f"{group}.{index}.{name}"
            value = _value_at(config, own)
            if value is not _ABSENT:
                settings[own] = value
    return settings


def topology_of_settings(settings: Settings, world_size: int) -> Topology:
    """Return the extents of a run, with what torchtitan derives derived as it does.

    A data_parallel_shard_degree of -1 takes the ranks that the other degrees leave, and a
    global_batch_size of -1 means one forward pass for each update. Where these do not divide, the
    result rounds down; ``number_violations`` and gt-config's rules report it.

    Args:
        settings: As of ``settings_of``.
        world_size: Ranks of the whole job.
    """

    def degree(kind: str) -> int:
        return int(settings[f"{_PARALLELISM}{kind}_degree"])

    replicate, cp = degree("data_parallel_replicate"), degree("context_parallel")
    tp, pp = degree("tensor_parallel"), degree("pipeline_parallel")
    shard = degree("data_parallel_shard")
    if shard == -1:
        shard = max(1, world_size // max(1, replicate * cp * tp * pp))
    local_batch_size = settings[_TRAINING + "local_batch_size"]
    global_batch_size = settings[_TRAINING + "global_batch_size"]
    samples = local_batch_size * replicate * shard
    steps = 1
    if global_batch_size > 0 and samples > 0:
        steps = max(1, global_batch_size // samples)
    return Topology(
        world=world_size,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        ep=degree("expert_parallel"),
        pp=pp,
        batch_size=local_batch_size,
        microbatch_size=settings[_PARALLELISM + "pipeline_parallel_microbatch_size"],
        seq_len=settings[_TRAINING + "seq_len"],
        gradient_accumulation_steps=steps,
        sequence_parallel=settings[_PARALLELISM + "enable_sequence_parallel"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedFlags:
    """The flags that a user typed, and the configuration without them."""

    names: frozenset[str] = frozenset()
    """As the help spells them."""
    configured: Settings = field(default_factory=lambda: MappingProxyType({}))
    """Settings of the configuration before they were applied."""

    def changes(self, settings: Settings) -> Settings:
        """Return the configured values of the flags with which another value was typed.

        A flag that is typed with its configured value changes nothing.

        Args:
            settings: Those of the configuration with what was typed.
        """
        return {
            flag: self.configured[flag]
            for flag in sorted(self.names & self.configured.keys() & settings.keys())
            if _plain(self.configured[flag]) != _plain(settings[flag])
        }


NOTHING_TYPED = TypedFlags()


def plain_violations(
    options: CompileConfig, run: RunNumbers, *, passes: Collection[str], typed: TypedFlags
) -> Iterator[Violation]:
    """Yield what is wrong with a run, as far as its numbers and names tell.

    Args:
        options: Its ``--compile.`` options.
        run: Its other settings, and what decides on them.
        passes: Names of the registered passes.
        typed: What the user typed.
    """
    topology = run.topology
    refused = find_violations(options, topology, known_passes=passes)
    yield from refused
    told = {violation.flag for violation in refused}  # with a better reason
    reshard = run.settings[_RESHARD]
    idle_ones = idle_violations(options, topology, reshard, passes=passes, asked=typed.names)
    yield from (violation for violation in idle_ones if violation.flag not in told)
    yield from option_violations(run, typed=typed)
    yield from number_violations(run.settings, topology, model=run.model)


def idle_violations(
    options: CompileConfig,
    topology: Topology,
    reshard: str,
    *,
    passes: Collection[str],
    asked: Collection[str] = (),
) -> Iterator[Violation]:
    """Yield the options of recipes that nothing in a run reads; malformed ones are left out.

    Args:
        options: The ``--compile.`` options.
        topology: The extents of the run.
        reshard: torchtitan's option for what is gathered again in the backward.
        passes: Names of the registered passes.
        asked: Flags that the user typed.
    """
    for path in malformed_options(options, known_passes=passes):
        options = with_option(options, path, default_option(type(options), path))
    yield from idle_options(options, topology, asked=asked)
    because, remedy = what_lacks(_RESHARDING, options, topology, looks_at_mesh=_RESHARD in asked)
    if reshard != "default" and because:
        yield idle(_RESHARD, reshard, "default", because=because, remedy=remedy)


def option_violations(run: RunNumbers, *, typed: TypedFlags) -> Iterator[Violation]:
    """Yield the typed options that nothing in the run reads, and the values that none may have.

    What a configuration itself sets is not refused where it does nothing.

    Args:
        run: Its settings, and what decides on them.
        typed: What the user typed.
    """
    changes = typed.changes(run.settings)
    for flag, value in run.settings.items():
        option = option_of(flag)
        if option is None:
            continue
        lacking = next((need for need in option.needs if not need.is_met(run)), None)
        if lacking is not None and flag in changes:
            yield Violation(
                flag=flag,
                value=value,
                allowed=f"its configured value {changes[flag]!r}, since {lacking.because} and it "
                "would do nothing",
                fix=", or ".join(filter(None, ["drop the option", lacking.fix])),
            )
            continue
        is_judged = lacking is None or (isinstance(value, float) and math.isnan(value))
        if is_judged and option.values is not None and not option.values.accepts(value):
            yield Violation(
                flag=flag, value=value, allowed=option.values.text, fix=option.values.fix
            )


def number_violations(
    settings: Settings, topology: Topology, *, model: ModelNumbers | None
) -> Iterator[Violation]:
    """Counts, rates and extents that no run can have, or none of that model.

    Args:
        settings: As of ``settings_of``.
        topology: Theirs.
        model: None is not judged.
    """
    yield from _uneven_batch(settings[_TRAINING + "global_batch_size"], topology)
    yield from _short_schedule(settings)
    if model is not None:
        yield from _model_does_not_divide(model, topology)
    # A planned step applies the loss to whole logits.
    if _NUM_CHUNKS in settings and not settings["--compile.autoparallel"]:
        yield from _uneven_loss_chunks(settings[_NUM_CHUNKS], topology)


def _uneven_batch(size: int, topology: Topology) -> Iterator[Violation]:
    samples = topology.batch_size * topology.dp_replicate * topology.dp_shard
    if size == -1 or samples < 1:
        return
    if size > 0 and size % samples == 0:
        return
    yield Violation(
        flag=_TRAINING + "global_batch_size",
        value=size,
        allowed=(
            f"a multiple of {samples} (local_batch_size {topology.batch_size} * "
            f"dp_replicate {topology.dp_replicate} * dp_shard {topology.dp_shard}), or -1 for that"
        ),
        fix=f"use {max(1, round(size / samples)) * samples}, or leave the flag out",
    )


def _short_schedule(settings: Settings) -> Iterator[Violation]:
    """Check that the learning rate is defined for all steps: it turns negative after the last."""
    total, steps = settings["--lr_scheduler.total_steps"], settings[_TRAINING + "steps"]
    if total is not None and 0 < total < steps:
        yield Violation(
            flag="--lr_scheduler.total_steps",
            value=total,
            allowed=f"at least --training.steps {steps}: the learning rate ends there",
            fix=f"use {steps} or more, or leave the flag out",
        )


def _model_does_not_divide(model: ModelNumbers, topology: Topology) -> Iterator[Violation]:
    uneven = [(name, heads) for name, heads in model.heads.items() if heads % max(1, topology.tp)]
    for name, heads in uneven[:1]:
        yield Violation(
            flag=_PARALLELISM + "tensor_parallel_degree",
            value=topology.tp,
            allowed=f"a divisor of the model's {name} {heads}",
            fix=f"use one of {', '.join(map(str, _divisors(heads)))}",
        )
    if topology.seq_len > model.max_seq_len:
        yield Violation(
            flag=_TRAINING + "seq_len",
            value=topology.seq_len,
            allowed=f"at most {model.max_seq_len}, the longest that the model's positions reach",
            fix=f"use {model.max_seq_len} or less",
        )
    if topology.ep > 1 and model.num_experts is None:
        yield Violation(
            flag=_PARALLELISM + "expert_parallel_degree",
            value=topology.ep,
            allowed="1: the model has no experts",
        )
    elif topology.ep > 1 and model.num_experts is not None and model.num_experts % topology.ep:
        yield Violation(
            flag=_PARALLELISM + "expert_parallel_degree",
            value=topology.ep,
            allowed=f"a divisor of the model's {model.num_experts} experts",
            fix=f"use one of {', '.join(map(str, _divisors(model.num_experts)))}",
        )


def _uneven_loss_chunks(chunks: int, topology: Topology) -> Iterator[Violation]:
    """A rank cuts its part of a sequence, so that all parts must have equal chunks."""
    seq_len, parts = topology.seq_len, max(1, topology.cp)
    if seq_len < 1 or (chunks > 0 and seq_len % (chunks * parts) == 0):
        return
    if chunks < 1:
        yield Violation(flag=_NUM_CHUNKS, value=chunks, allowed="1 or more", fix="give 1 or more")
        return
    fits = max(divisor for divisor in _divisors(max(1, seq_len // parts)) if divisor <= chunks)
    multiple = chunks * parts
    on_each = f" on each of {parts} ranks that share it" if parts > 1 else ""
    yield Violation(
        flag=_TRAINING + "seq_len",
        value=seq_len,
        allowed=f"a multiple of {multiple}, for the loss's equal chunks ({_NUM_CHUNKS}){on_each}",
        fix=f"use {-(-seq_len // multiple) * multiple}, or {_NUM_CHUNKS} {fits}",
    )


def _plain(value: Any) -> Any:
    """Return a value such that those of JSON equal those of a configuration."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _value_at(config: object, flag: str) -> Any:
    value: Any = config
    for name in flag.removeprefix("--").split("."):
        if name.isdecimal():
            value = value[int(name)]
        elif isinstance(value, Mapping):
            value = value.get(name, _ABSENT)
        else:
            value = getattr(value, name, _ABSENT)
    return value
