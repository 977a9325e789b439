"""What a rule between fields is, and the list that rules enter by being declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gt_config._subject import Subject, flag_of, value_at
from gt_config.errors import Violation
from gt_config.option_paths import default_option

Check = Callable[[Subject], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check, and the paths whose values it relies on."""

    reads: tuple[str, ...]
    check: Check


RULES: list[Rule] = []
"""Every rule, in the order in which violations are reported."""


def rule(*reads: str) -> Callable[[Check], Check]:
    """Enter the decorated check into ``RULES``; it may rely on the values at these paths."""

    def register(check: Check) -> Check:
        RULES.append(Rule(reads=reads, check=check))
        return check

    return register


def violation(subject: Subject, path: str, *, allowed: str, fix: str) -> Violation:
    """The value at ``path``, what is allowed there, and what to do."""
    return Violation(flag=flag_of(path), value=value_at(subject, path), allowed=allowed, fix=fix)


def must_be_default(
    subject: Subject, path: str, *, because: str, switch: str
) -> Iterator[Violation]:
    """A violation if the value at ``path`` is not its default, where it would do nothing."""
    default = default_option(type(subject.config), path.removeprefix("config."))
    if value_at(subject, path) == default:
        return
    yield violation(
        subject,
        path,
        allowed=f"its default {default!r}, since {because} and it would do nothing",
        fix=f"drop the option, or use {switch}",
    )


def round_up(value: int, divisor: int) -> int:
    """The smallest multiple of ``divisor`` that is not below ``value``."""
    return -(-value // divisor) * divisor
