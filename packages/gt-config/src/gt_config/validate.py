"""Judges a configuration before anything expensive starts: every rule, all violations at once.

Validation takes plain data, so that it runs in a launcher before any process, device or process
group exists, and so that this package need not know the registry of passes, which lives downstream.
It judges what needs no model, machine or pass; a trainer adds rules about those (``gt_trainer``'s
are in its ``preflight``). What has been judged is trusted afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from gt_config._field_values import check_field_values
from gt_config._rules import RULES
from gt_config._rules.names import NAME_RULES
from gt_config._subject import Subject
from gt_config.compile_config import CompileConfig
from gt_config.errors import ConfigError, Violation
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
    subject = Subject(config=config, topology=topology, known_passes=tuple(known_passes))

    unsound: list[str] = []
    violations: list[Violation] = []
    for path, violation in check_field_values(subject):
        unsound.append(path)
        violations.append(violation)
    for rule in RULES:
        if _sound(rule.reads, unsound):
            violations.extend(rule.check(subject))
    if name_flag is None:
        return tuple(violations)
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
    topology = Topology(world=1, batch_size=1, seq_len=1)
    subject = Subject(config=config, topology=topology, known_passes=tuple(known_passes))
    malformed = [path for path, _ in check_field_values(subject)]
    malformed += [
        path
        for rule in NAME_RULES
        if _sound(rule.reads, malformed) and any(rule.check(subject))
        for path in rule.reads
    ]
    return tuple(path.removeprefix("config.") for path in malformed)


def _sound(paths: Collection[str], unsound: Collection[str]) -> bool:
    """Whether no path, nor anything it lies in, is known to hold a wrong value."""
    return not any(
        path == wrong or path.startswith(f"{wrong}.") for path in paths for wrong in unsound
    )
