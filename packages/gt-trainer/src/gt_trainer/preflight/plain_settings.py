"""Degrees, extents, counts and rates: what of a run is judged as plain numbers, without torch.

Settings are values by the flag that sets them. Preflight reads them off a configuration, and the
command line off a table and what was typed (``command_line.early_refusal``), so that both judge by
the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gt_config import Topology, Violation

Settings = Mapping[str, Any]
"""Values by flag, as ``--training.steps``."""

_PARALLELISM = "--parallelism."
_TRAINING = "--training."
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


def number_violations(settings: Settings, topology: Topology) -> Iterator[Violation]:
    """Counts, rates and batches that no run can have.

    Args:
        settings: As of ``settings_of``.
        topology: Theirs.
    """
    counts = [_TRAINING + "steps", _TRAINING + "gc_freq", "--metrics.log_freq"]
    if settings["--validator.enable"]:
        counts.append("--validator.freq")
    yield from _unsound_counts(settings, counts)
    yield from _uneven_batch(settings[_TRAINING + "global_batch_size"], topology)
    yield from _unsound_rates(settings)


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


def _value_at(config: object, flag: str) -> Any:
    value: Any = config
    for name in flag.removeprefix("--").split("."):
        value = getattr(value, name)
    return value
