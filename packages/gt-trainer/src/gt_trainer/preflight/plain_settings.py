"""Degrees, extents, counts and rates: what of a run is judged as plain numbers, without torch.

Settings are values by the flag that sets them. Preflight reads them off a configuration, and the
command line off a table and what was typed (``command_line.early_refusal``), so that both judge by
the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gt_config import Topology, Violation

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


_PARALLELISM = "--parallelism."
_TRAINING = "--training."
_NUM_CHUNKS = "--loss.num_chunks"
_GROUPS = "--optimizer.param_groups"
_JUDGED = (
    *(
        _PARALLELISM + kind + "_degree"
        for kind in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "context_parallel",
            "tensor_parallel",
            "expert_parallel",
            "pipeline_parallel",
        )
    ),
    _PARALLELISM + "pipeline_parallel_microbatch_size",
    _PARALLELISM + "enable_sequence_parallel",
    _TRAINING + "local_batch_size",
    _TRAINING + "global_batch_size",
    _TRAINING + "seq_len",
    _TRAINING + "steps",
    _TRAINING + "gc_freq",
    _TRAINING + "max_norm",
    "--metrics.log_freq",
    "--validator.enable",
    "--validator.freq",
    "--lr_scheduler.min_lr_factor",
    "--compile.autoparallel",
)


def settings_of(config: object) -> dict[str, Any]:
    """Return what the functions of this module read of a configuration.

    Args:
        config: A ``torchtitan.trainer.Trainer.Config``, named by no type since this module knows no
            torchtitan.
    """
    settings = {flag: _value_at(config, flag) for flag in _JUDGED}
    for index, group in enumerate(_value_at(config, _GROUPS)):
        for name in ("lr", "weight_decay"):
            if name in group.optimizer_kwargs:
                flag = f"{_GROUPS}.{index}.optimizer_kwargs.{name}"
                settings[flag] = group.optimizer_kwargs[name]
    num_chunks = getattr(_value_at(config, "--loss"), "num_chunks", None)
    return settings if num_chunks is None else {**settings, _NUM_CHUNKS: num_chunks}


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


def number_violations(
    settings: Settings, topology: Topology, *, model: ModelNumbers | None
) -> Iterator[Violation]:
    """Counts, rates and extents that no run can have, or none of that model.

    Args:
        settings: As of ``settings_of``.
        topology: Theirs.
        model: None is not judged.
    """
    counts = [_TRAINING + "steps", _TRAINING + "gc_freq", "--metrics.log_freq"]
    if settings["--validator.enable"]:
        counts.append("--validator.freq")
    yield from _unsound_counts(settings, counts)
    yield from _uneven_batch(settings[_TRAINING + "global_batch_size"], topology)
    yield from _unsound_rates(settings)
    if model is not None:
        yield from _model_does_not_divide(model, topology)
    # A planned step applies the loss to whole logits.
    if _NUM_CHUNKS in settings and not settings["--compile.autoparallel"]:
        yield from _uneven_loss_chunks(settings[_NUM_CHUNKS], topology)


def _unsound_counts(settings: Settings, flags: Sequence[str]) -> Iterator[Violation]:
    for flag in flags:
        if settings[flag] < 1:
            yield Violation(
                flag=flag, value=settings[flag], allowed="1 or more", fix="give 1 or more"
            )


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


def _unsound_rates(settings: Settings) -> Iterator[Violation]:
    rates = [flag for flag in settings if flag.startswith(_GROUPS)]
    for flag in (*rates, "--lr_scheduler.min_lr_factor"):
        value = settings[flag]
        if not (math.isfinite(value) and value >= 0):
            yield Violation(
                flag=flag, value=value, allowed="a finite number, 0 or more", fix="give one"
            )
    max_norm = settings[_TRAINING + "max_norm"]
    if math.isnan(max_norm) or max_norm < 0:
        yield Violation(
            flag=_TRAINING + "max_norm", value=max_norm, allowed="0 or more", fix="give 0 or more"
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
            fix="leave the flag out",
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


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _value_at(config: object, flag: str) -> Any:
    value: Any = config
    for name in flag.removeprefix("--").split("."):
        value = getattr(value, name)
    return value
