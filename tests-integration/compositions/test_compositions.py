"""Every two features that docs/what-works-with-what.md says may go together are captured together.

Of a small model, for ranks that do not exist: built, placed, captured, cut into stages where there
is a pipeline, changed by every pass of its recipe, each of which the verifier checks. Which bits a
run has, other tests say.
"""

from __future__ import annotations

from typing import Any

import pytest

from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.preflight.preflight import configuration_violations
from what_works import FEATURES, configuration_of, contradict

_NAMES = tuple(FEATURES)
_QUICK = {("PP", "TP"), ("CUDA graphs", "selective")}
"""Pairs that every run of the tests captures."""


def _pairs() -> list[Any]:
    found = []
    for row, one in enumerate(_NAMES):
        for other in _NAMES[: row + 1]:
            if contradict(FEATURES[one], FEATURES[other]):
                continue
            marks = [] if (one, other) in _QUICK else [pytest.mark.slow]
            found.append(pytest.param(one, other, id=f"{one} and {other}", marks=marks))
    return found


@pytest.mark.parametrize(("one", "other"), _pairs())
def test_what_nothing_refuses_is_captured_and_verified(one: str, other: str):
    config, world_size = configuration_of({**FEATURES[one], **FEATURES[other]})
    refusal = next(configuration_violations(config, world_size), None)
    if refusal is not None:
        assert refusal.flag.startswith("--")
        return
    assert config.compile.verify_passes
    report = dry_run(config, world_size)
    assert report.captured
    assert all(each.num_nodes > 0 for each in report.captured)
