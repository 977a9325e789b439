"""Judges a configuration before anything expensive starts: every rule, all violations at once.

Validation takes plain data, so that it runs in a launcher before any process, device or process
group exists, and so that this package need not know the registry of passes, which lives downstream.
What has been validated is trusted afterwards; no other package checks a flag again.
"""

from __future__ import annotations

from collections.abc import Collection

from gt_config._field_values import check_field_values
from gt_config._rules import RULES
from gt_config._subject import Subject, flag_of, value_at
from gt_config.compile_config import CompileConfig
from gt_config.errors import ConfigError, Violation
from gt_config.landed import UNLANDED, UnlandedOption
from gt_config.topology import Topology


def validate(
    config: CompileConfig,
    topology: Topology,
    *,
    known_passes: Collection[str],
    unlanded: Collection[UnlandedOption] = UNLANDED,
) -> None:
    """Refuse a configuration that breaks any rule.

    Args:
        config: the flags under ``--compile.``.
        topology: the mesh degrees and batch extents of the run, in ranks, samples and tokens.
        known_passes: every registered pass name.
        unlanded: options to refuse because they have not been built yet.

    Raises:
        ConfigError: lists every violation with its flag, value, what is allowed and the fix.
        TypeError: an argument is not of its type at all.
    """
    violations = find_violations(config, topology, known_passes=known_passes, unlanded=unlanded)
    if violations:
        raise ConfigError(violations)


def find_violations(
    config: CompileConfig,
    topology: Topology,
    *,
    known_passes: Collection[str],
    unlanded: Collection[UnlandedOption] = UNLANDED,
) -> tuple[Violation, ...]:
    """What ``validate`` would raise, as data: for a caller that has rules of its own to add.

    The order is fixed: single fields as declared, then rules between fields, then unlanded options.

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
    violations.extend(
        Violation(
            flag=flag_of(option.path),
            value=value_at(subject, option.path),
            allowed=f"{option.landed} in this version",
            fix=f"use {option.landed}: {option.reason}",
        )
        for option in unlanded
        if _sound((option.path,), unsound) and option.refused(value_at(subject, option.path))
    )
    return tuple(violations)


def _sound(paths: Collection[str], unsound: Collection[str]) -> bool:
    """Whether no path, nor anything it lies in, is known to hold a wrong value."""
    return not any(
        path == wrong or path.startswith(f"{wrong}.") for path in paths for wrong in unsound
    )
