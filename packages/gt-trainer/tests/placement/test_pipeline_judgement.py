"""Which step a pipeline takes, for drawn times, and how that is said and kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_autoparallel import JudgedStep
from gt_config import Fingerprint
from gt_trainer.placement.pipeline_judgement import (
    NoJudgementError,
    PipelineJudgement,
    digest_of,
    read_judgement,
    written_judgement,
)

GIB = 2**30
RUN = Fingerprint.of({"world_size": 2048})
STEPS = st.builds(
    JudgedStep,
    step_us=st.floats(1.0, 1e9),
    peak_bytes=st.integers(1, 200 * GIB),
    fits=st.booleans(),
)


def step(seconds: float, gib: float = 60.0, *, fits: bool = True) -> JudgedStep:
    return JudgedStep(step_us=seconds * 1e6, peak_bytes=int(gib * GIB), fits=fits)


def judgement(
    planned: JudgedStep, by_hand: JudgedStep, gib: int | None = None
) -> PipelineJudgement:
    budget = None if gib is None else gib * GIB
    return PipelineJudgement(planned=planned, by_hand=by_hand, budget_bytes=budget, made_for=RUN)


@given(STEPS, STEPS)
def test_no_step_that_is_taken_is_slower_than_one_by_hand_that_fits(
    planned: JudgedStep, by_hand: JudgedStep
) -> None:
    judged = judgement(planned, by_hand)
    taken = by_hand if judged.takes_by_hand else planned
    assert taken.fits or not by_hand.fits
    if planned.fits and by_hand.fits:
        assert taken.step_us <= 1.01 * by_hand.step_us


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (
            judgement(step(46.279), step(43.446)),
            "pipeline: by hand 43,446.0 ms is faster than the plan's 46,279.0 ms: taken",
        ),
        (
            judgement(step(1, 90, fits=False), step(2)),
            "pipeline: by hand 2,000.0 ms fits, unlike the plan's 1,000.0 ms: taken",
        ),
        (
            judgement(step(46, 65), step(43, 64), gib=60),
            "pipeline: by hand 43,000.0 ms is faster than the plan's 46,000.0 ms: taken",
        ),
    ],
)
def test_takes_the_step_by_hand(judged: PipelineJudgement, said: str) -> None:
    assert judged.takes_by_hand
    assert str(judged) == said


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (
            judgement(step(1), step(2)),
            "pipeline: the plan's 1,000.0 ms are taken, by hand 2,000.0 ms",
        ),
        (
            judgement(step(28.594), step(28.434)),
            (
                "pipeline: the plan's 28,594.0 ms are taken, by hand 28,434.0 ms, which is no more "
                "than 1 % faster"
            ),
        ),
        (
            judgement(step(2), step(1, 90, fits=False)),
            "pipeline: the plan's 2,000.0 ms are taken, by hand 1,000.0 ms, which does not fit",
        ),
        (
            judgement(step(2, 30), step(1, 50), gib=40),
            (
                "pipeline: the plan's 2,000.0 ms are taken, by hand 1,000.0 ms, which takes 50.00 "
                "GiB and so more than asked for"
            ),
        ),
    ],
)
def test_takes_the_plan(judged: PipelineJudgement, said: str) -> None:
    assert not judged.takes_by_hand
    assert str(judged) == said


@pytest.mark.parametrize("planned", [step(46.279), step(43.4)])
def test_reads_what_it_wrote(tmp_path: Path, planned: JudgedStep) -> None:
    judged = judgement(planned, step(43.446), gib=70)
    judged = dataclasses.replace(judged, plan_digest=digest_of(b"a plan"))
    path = tmp_path / "judgement.json"
    path.write_bytes(written_judgement(judged))
    assert read_judgement(path) == judged


UNMADE = PipelineJudgement(
    planned=None, by_hand=None, no_step_because="in no chunks", budget_bytes=GIB, made_for=RUN
)


def test_takes_by_hand_what_has_no_planned_step_and_reads_why(tmp_path: Path) -> None:
    assert UNMADE.takes_by_hand
    assert str(UNMADE) == "pipeline: by hand is taken, as the plan has no step: in no chunks"
    path = tmp_path / "judgement.json"
    path.write_bytes(written_judgement(UNMADE))
    assert read_judgement(path) == UNMADE


@pytest.mark.parametrize(
    "changes", [{"no_step_because": ""}, {"planned": step(1), "by_hand": step(1)}]
)
def test_a_judgement_has_two_steps_or_a_reason(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^give two steps, or why there is none of the plan$"):
        dataclasses.replace(UNMADE, **changes)


def test_reads_files_of_before_there_were_plans_without_a_step(tmp_path: Path) -> None:
    path = tmp_path / "judgement.json"
    judged = judgement(step(2), step(1))
    content = json.loads(written_judgement(judged))
    del content["no_step_because"]
    path.write_text(json.dumps(content))
    assert read_judgement(path) == judged


WRITTEN = json.loads(written_judgement(judgement(step(2), step(1))))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        written_judgement(judgement(step(2), step(1)))[:-20],
        json.dumps({**WRITTEN, "version": 2}).encode(),
        json.dumps({**WRITTEN, "format": "gt-autoparallel plan"}).encode(),
        json.dumps({**WRITTEN, "unknown": 1}).encode(),
        json.dumps({**WRITTEN, "planned": None}).encode(),
        json.dumps({**WRITTEN, "planned": {"step_us": 1.0}}).encode(),
        json.dumps({**WRITTEN, "made_for": {**WRITTEN["made_for"], "fields": {}}}).encode(),
    ],
)
def test_refuses_what_is_no_judgement(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "judgement.json"
    path.write_bytes(content)
    with pytest.raises(NoJudgementError) as refused:
        read_judgement(path)
    assert str(refused.value) == f"{path} does not say how a pipeline was judged"
