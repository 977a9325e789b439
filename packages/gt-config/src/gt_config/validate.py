"""Judges a configuration before anything expensive starts: every rule, all violations at once.

Validation takes plain data, so that it runs in a launcher before any process, device or process
group exists, and so that this package need not know the registry of passes, which lives downstream.
It judges what needs no model, machine or pass; a trainer adds rules about those (``gt_trainer``'s
are in its ``preflight``). What has been judged is trusted afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from gt_config._field_types import describe_hint, field_hints, matches_hint
from gt_config.compile_config import CompileConfig
from gt_config.errors import ConfigError, Violation
from gt_config.option_paths import flag_of
from gt_config.refusals import Sound, find_refusals, wrong_names
from gt_config.topology import Topology

_FLAG = re.compile(r"--\w+(?:\.\w+)+")
"""A flag within a sentence."""


def validate(
    config: CompileConfig,
    topology: Topology,
    *,
    known_passes: Collection[str],
    name_flag: Callable[[str], str] | None = None,
) -> None:
    """Refuse a configuration that breaks any rule.

    Args:
        config: the flags under ``--compile.``.
        topology: the mesh degrees and batch extents of the run, in ranks, samples and tokens.
        known_passes: every registered pass name.
        name_flag: what a caller's users type for a flag of gt-train, such as ``--compile.mode`` or
            a value of ``gt_config.topology.TOPOLOGY_FLAGS``: messages name that. None: they name
            gt-train's.

    Raises:
        ConfigError: lists every violation with its flag, value, what is allowed and the fix.
        TypeError: an argument is not of its type at all.
    """
    violations = find_violations(config, topology, known_passes=known_passes, name_flag=name_flag)
    if violations:
        raise ConfigError(violations)


def find_violations(
    config: CompileConfig,
    topology: Topology,
    *,
    known_passes: Collection[str],
    name_flag: Callable[[str], str] | None = None,
) -> tuple[Violation, ...]:
    """What ``validate`` would raise, as data: for a caller that has rules of its own to add.

    The order is fixed: single fields as declared, then rules between fields.

    Raises:
        TypeError: an argument is not of its type at all.
    """
    if not isinstance(config, CompileConfig):
        raise TypeError(f"config is {config!r}, not a gt_config.CompileConfig")
    if not isinstance(topology, Topology):
        raise TypeError(f"topology is {topology!r}, not a gt_config.Topology")
    if isinstance(known_passes, str):
        raise TypeError(f"known_passes is {known_passes!r}, not a collection of names")
    wrong = dict(_wrong_values(config, topology))
    refused = find_refusals(config, topology, known_passes=known_passes, wrong=wrong)
    violations = (*wrong.values(), *refused)
    if name_flag is None:
        return violations
    return tuple(_renamed(violation, name_flag) for violation in violations)


def _renamed(violation: Violation, name_flag: Callable[[str], str]) -> Violation:
    """A violation in the words of a trainer whose flags have other names."""

    def renamed(text: str) -> str:
        return _FLAG.sub(lambda match: name_flag(match[0]), text)

    return replace(
        violation,
        flag=name_flag(violation.flag),
        allowed=renamed(violation.allowed),
        fix=renamed(violation.fix),
    )


def malformed_options(config: CompileConfig, *, known_passes: Collection[str]) -> tuple[str, ...]:
    """Paths of the options whose values are wrong by themselves, whatever the others are."""
    wrong = dict(_wrong_values(config, Topology(world=1, batch_size=1, seq_len=1)))
    names = wrong_names(Sound(config, "config", wrong), known_passes=known_passes)
    flags = [violation.flag for violation in (*wrong.values(), *names)]
    return tuple(dict.fromkeys(flag.removeprefix("--compile.") for flag in flags))


# Rules about one field alone: its type, its literal values, its bounds.
#
# They run first; a rule about several fields is then left out where one of them is already known
# to be wrong, so that one mistake is reported once.
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldBound:
    """Which numbers of the right type a field accepts."""

    holds: Callable[[Any], bool]
    words: str


def _at_least(limit: int) -> FieldBound:
    return FieldBound(holds=lambda value: value >= limit, words=f"{limit} or more")


_POSITIVE = FieldBound(
    # The upper limit keeps sizes in bytes within what numbers of any type can count.
    holds=lambda value: 0 < value <= 1e9,
    words="a number above 0, at most 1e9",
)
_POSITIVE_OR_NONE = FieldBound(
    holds=lambda value: value is None or _POSITIVE.holds(value),
    words=f"None, or {_POSITIVE.words}",
)

BOUNDS: dict[str, FieldBound] = {
    "config.artifacts_max_gib": _POSITIVE,
    "config.autoparallel_solver.memory_budget_gib": _POSITIVE_OR_NONE,
    "config.autoparallel_solver.time_limit_seconds": _POSITIVE,
    "config.autoparallel_solver.relative_gap": FieldBound(
        holds=lambda value: 0 <= value < 1, words="from 0 up to, but not including, 1"
    ),
    "config.fsdp_bucket_cap_mib": _POSITIVE_OR_NONE,
    "config.offload_host_gib": _POSITIVE_OR_NONE,
    "config.pipeline_gathered_gib": _POSITIVE_OR_NONE,
    "config.pipeline_deferred_weights": _POSITIVE_OR_NONE,
    "config.offload_prefetch_layers": _at_least(0),
    "config.offload_defer_layers": _at_least(0),
    "config.prefetch_layers": _at_least(0),
    "config.ep_overlap.num_chunks": _at_least(2),
    "topology.world": _at_least(1),
    "topology.dp_replicate": _at_least(1),
    "topology.dp_shard": _at_least(1),
    "topology.cp": _at_least(1),
    "topology.tp": _at_least(1),
    "topology.ep": _at_least(1),
    "topology.pp": _at_least(1),
    "topology.batch_size": _at_least(1),
    "topology.microbatch_size": _at_least(1),
    "topology.seq_len": _at_least(1),
    "topology.gradient_accumulation_steps": _at_least(1),
}
"""Every numeric field has an entry; a test holds this to it."""


def _wrong_values(config: CompileConfig, topology: Topology) -> Iterator[tuple[str, Violation]]:
    """Yield each field whose value is wrong by itself, as (path, violation)."""
    yield from _check_fields(config, CompileConfig, "config")
    yield from _check_fields(topology, Topology, "topology")


def _check_fields(values: object, cls: type, prefix: str) -> Iterator[tuple[str, Violation]]:
    for name, hint in field_hints(cls).items():
        path, value = f"{prefix}.{name}", getattr(values, name)
        if not (is_dataclass(hint) and isinstance(hint, type)):
            violation = _check_value(path, value, hint)
            if violation is not None:
                yield path, violation
        elif isinstance(value, hint):
            yield from _check_fields(value, hint, path)
        else:
            allowed = f"an instance of {hint.__name__}"
            fix = f"build it with gt_config.{hint.__name__}(...)"
            yield path, Violation(flag=flag_of(path), value=value, allowed=allowed, fix=fix)


def _check_value(path: str, value: object, hint: Any) -> Violation | None:
    if not matches_hint(value, hint):
        allowed = describe_hint(hint)
        fix = _nearest(value, hint) or f"give {allowed}"
        return Violation(flag=flag_of(path), value=value, allowed=allowed, fix=fix)
    bound = BOUNDS.get(path)
    if bound is None or bound.holds(value):
        return None
    return Violation(
        flag=flag_of(path), value=value, allowed=bound.words, fix=f"give {bound.words}"
    )


def _nearest(value: object, hint: Any) -> str | None:
    if get_origin(hint) is not Literal or not isinstance(value, str):
        return None
    near = get_close_matches(value, [str(choice) for choice in get_args(hint)], n=1)
    return f"did you mean {near[0]!r}?" if near else None
