"""Of several plans the fastest that fits is taken, as an exhaustive comparison finds it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from gt_autoparallel import JudgedStep, PlanJudgement
from gt_autoparallel.plan.judgement import Candidate, fastest

STEPS = st.none() | st.builds(
    JudgedStep,
    step_us=st.sampled_from([1.0, 2.0, 3.0]),
    peak_bytes=st.integers(1, 3),
    fits=st.booleans(),
)


def candidate(name: str, step: JudgedStep | None) -> Candidate:
    return Candidate(name=name, objective_us=1.0, step=step, reason="" if step else "too dear")


@given(st.lists(STEPS, min_size=1).filter(any))
def test_the_fastest_is_no_slower_than_any_that_fits(steps: list[JudgedStep | None]) -> None:
    candidates = [candidate(str(number), step) for number, step in enumerate(steps)]
    found = fastest(candidates)
    assert found.step is not None
    there = [each.step for each in candidates if each.step is not None]
    fitting = [step for step in there if step.fits]
    if fitting:
        assert found.step.fits
        assert found.step.step_us == min(step.step_us for step in fitting)
        same = [s is not None and s.fits and s.step_us == found.step.step_us for s in steps]
    else:
        assert found.step.peak_bytes == min(step.peak_bytes for step in there)
        same = [s is not None and s.peak_bytes == found.step.peak_bytes for s in steps]
    assert found.name == str(same.index(True))


def test_no_step_is_better_than_itself_nor_two_than_each_other() -> None:
    one = JudgedStep(step_us=1.0, peak_bytes=1, fits=True)
    steps = [
        replace(one, step_us=time, peak_bytes=size, fits=fits)
        for time, size, fits in product((1.0, 2.0), (1, 2), (True, False))
    ]
    for first, second in product(steps, steps):
        assert not (first.is_better_than(second) and second.is_better_than(first))


def test_a_judgement_says_what_was_taken_and_why_others_were_not_simulated() -> None:
    slow = JudgedStep(step_us=2e3, peak_bytes=2**30, fits=True)
    large = JudgedStep(step_us=1e3, peak_bytes=2**31, fits=False)
    judgement = PlanJudgement(
        chosen="planner",
        candidates=(
            candidate("planner", slow),
            candidate("FSDP", large),
            candidate("FSDP + TP", None),
        ),
    )
    assert str(judgement).splitlines() == [
        "taken: planner: 2.0 ms, 1.00 GiB",
        "FSDP: 1.0 ms, 2.00 GiB, does not fit",
        "FSDP + TP: too dear",
    ]
