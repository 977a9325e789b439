"""Rules of options that hold names: selectors, patterns, passes."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from gt_config._rules.rule import RULES, Rule, rule
from gt_config._subject import Subject, flag_of, value_at
from gt_config.errors import SelectorSyntaxError, Violation
from gt_config.selectors import (
    MODULE_PATTERN_SYNTAX,
    SELECTOR_SYNTAX,
    SavedOpSelector,
    is_module_pattern,
)


@rule("config.full_recompute_saved_ops")
def _saved_ops_are_selectors(subject: Subject) -> Iterator[Violation]:
    for text in subject.config.full_recompute_saved_ops:
        try:
            SavedOpSelector.parse(text)
        except SelectorSyntaxError:
            yield Violation(
                flag=flag_of("config.full_recompute_saved_ops"),
                value=text,
                allowed=SELECTOR_SYNTAX,
                fix="write it in that form",
            )


@rule("config.regional_modules")
def _regional_modules_are_patterns(subject: Subject) -> Iterator[Violation]:
    yield from _no_patterns(subject, "config.regional_modules")


@rule("config.require_float8")
def _required_modules_are_patterns(subject: Subject) -> Iterator[Violation]:
    yield from _no_patterns(subject, "config.require_float8")


def _no_patterns(subject: Subject, path: str) -> Iterator[Violation]:
    texts: tuple[str, ...] = value_at(subject, path)
    for text in texts:
        if not is_module_pattern(text):
            yield Violation(
                flag=flag_of(path),
                value=text,
                allowed=MODULE_PATTERN_SYNTAX,
                fix="write it in that form",
            )


@rule("config.passes", "config.disable_passes")
def _passes_are_registered_and_named_once(subject: Subject) -> Iterator[Violation]:
    for path in ("config.passes", "config.disable_passes"):
        names: tuple[str, ...] = value_at(subject, path)
        for name in dict.fromkeys(names):
            if name not in subject.known_passes:
                yield _unknown_pass(subject, path, name)
            if names.count(name) > 1:
                yield Violation(
                    flag=flag_of(path),
                    value=name,
                    allowed="each pass once",
                    fix=f"name it once; it is named {names.count(name)} times",
                )
    for name in dict.fromkeys(subject.config.passes):
        if name in subject.config.disable_passes:
            yield Violation(
                flag=flag_of("config.disable_passes"),
                value=name,
                allowed="passes that --compile.passes does not name",
                fix="drop it from one of the two",
            )


def _unknown_pass(subject: Subject, path: str, name: str) -> Violation:
    known = sorted(subject.known_passes)
    near = get_close_matches(name, known)
    return Violation(
        flag=flag_of(path),
        value=name,
        allowed=f"the registered passes: {', '.join(known)}" if known else "no pass is registered",
        fix=f"did you mean {' or '.join(map(repr, near))}?" if near else "drop it",
    )


NAME_RULES: tuple[Rule, ...] = tuple(each for each in RULES if each.check.__module__ == __name__)
"""The rules above: each judges values that hold names by themselves."""
