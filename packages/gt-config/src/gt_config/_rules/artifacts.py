"""Rules of stored graphs: what identifies them must be all that they depend on."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import rule, violation
from gt_config._subject import Subject
from gt_config.errors import Violation


@rule("config.artifacts", "config.autoparallel")
def _plans_identify_no_stored_graph(subject: Subject) -> Iterator[Violation]:
    if subject.config.artifacts is None or not subject.config.autoparallel:
        return
    yield violation(
        subject,
        "config.artifacts",
        allowed="None with --compile.autoparallel: the plan is no part of what identifies a "
        "stored graph",
        fix="drop one of the two",
    )
