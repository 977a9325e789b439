"""Rules of products in 8 bits: what they round is no bit of a run in the model's own precision."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import rule, violation
from gt_config._subject import Subject
from gt_config.errors import Violation


@rule("config.require_float8", "config.bitwise")
def _float8_is_not_bitwise(subject: Subject) -> Iterator[Violation]:
    if not subject.config.require_float8 or not subject.config.bitwise:
        return
    yield violation(
        subject,
        "config.require_float8",
        allowed="() with --compile.bitwise: products in 8 bits are approximate",
        fix="drop one of the two",
    )
