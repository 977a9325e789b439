"""The fuzzer: a slice of its campaign, every case it once found, and proof that it finds faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from fuzz.__main__ import REGRESSIONS, main
from fuzz.campaign import draw_cases, run_campaign
from fuzz.case import Case, PartSpec, PassSpec, StepSpec
from fuzz.minimize import minimize
from fuzz.parts import PART_KINDS
from fuzz.pass_lists import fuzzed_passes, reason_to_exclude
from fuzz.verdict import Judge
from gt_passes.registry import find_passes, known_passes

NUM_CASES = 40
STEP = StepSpec(seed=3, blocks=((PartSpec(kind="norm", options={"rms": True}),),))


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as judge:
        yield judge


def planted(name: str, step: StepSpec = STEP) -> Case:
    faulty = PassSpec(name=f"planted-{name}", module="fuzz.planted_passes")
    return Case(step=step, passes=(PassSpec(name="remove-dead-code"), faulty))


def test_random_steps_keep_every_bit_under_random_passes(judge: Judge) -> None:
    lines: list[str] = []
    report = run_campaign(judge, num_cases=NUM_CASES, seed=0, say=lines.append, lists_per_step=8)
    assert not report.failures, "\n".join([*lines, *(str(failure) for failure in report.failures)])
    assert report.num_by_outcome == {"equal": NUM_CASES}
    assert report.num_changed > NUM_CASES // 4


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_right(path: Path, judge: Judge) -> None:
    verdict = judge.judge(Case.from_json(path.read_text()))
    assert verdict.outcome == "equal", verdict.details


@pytest.mark.parametrize("kind", sorted(PART_KINDS))
def test_every_kind_of_layer_can_be_captured_and_repeats_itself(kind: str, judge: Judge) -> None:
    options = PART_KINDS[kind].draw(random.Random(0))
    step = replace(STEP, blocks=((PartSpec(kind=kind, options=options),),))
    case = Case(step=step, passes=(PassSpec(name="remove-dead-code"),))
    verdict = judge.judge(case)
    assert verdict.outcome == "equal", verdict.details


def test_finds_a_pass_that_computes_something_else_and_makes_the_case_small(judge: Judge) -> None:
    dropout = PartSpec(kind="dropout", options={"p": 0.25})
    noise = PartSpec(kind="noise")
    step = StepSpec(
        seed=3, tied=True, num_microbatches=2, blocks=((noise, dropout, noise), (noise,))
    )
    case = planted("drop-more", step)
    verdict = judge.judge(case)
    assert verdict.outcome == "silent difference"
    assert "rank 1: output ['loss']: expected float32[]" in verdict.details

    small = minimize(case, lambda smaller: judge.judge(smaller).outcome == "silent difference")
    assert small == Case(step=StepSpec(seed=3, blocks=((dropout,),)), passes=case.passes[1:])


@pytest.mark.parametrize(
    ("name", "outcome", "detail"),
    [
        ("raise", "crash", "LookupError: planted"),
        ("forget-wait", "caught", "after the pass planted-forget-wait"),
        ("reorder-one-rank", "ranks disagree", "rank 1: refused by the verifier"),
        ("end-process", "hang", "rank 1 died with exit code 3"),
    ],
)
def test_finds_a_faulty_pass(name: str, outcome: str, detail: str, judge: Judge) -> None:
    verdict = judge.judge(planted(name))
    assert verdict.outcome == outcome
    assert detail in verdict.details


def test_finds_a_bucket_in_another_order_on_one_rank(judge: Judge) -> None:
    norms = (PartSpec(kind="norm", options={"rms": True}),) * 2
    case = planted("swap-in-one-bucket", replace(STEP, blocks=(norms,)))
    bucketed = (PassSpec(name="bucket-all-gathers"), *case.passes)
    verdict = judge.judge(replace(case, passes=bucketed))
    assert verdict.outcome == "ranks disagree", verdict.details
    assert "rank 1: transformed" in verdict.details  # each rank's graph is right for itself


def test_cases_survive_json() -> None:
    for case in islice(draw_cases(7, lists_per_step=2), 40):
        assert Case.from_json(case.to_json()) == case


def test_a_seed_draws_the_same_cases_again() -> None:
    assert list(islice(draw_cases(7), 60)) == list(islice(draw_cases(7), 60))
    assert next(draw_cases(7)) != next(draw_cases(8))


def test_every_pass_that_claims_to_keep_every_bit_is_drawn_or_says_why_not() -> None:
    drawn = {spec.name for case in islice(draw_cases(0), 400) for spec in case.passes}
    assert drawn == set(fuzzed_passes())
    for pass_class in find_passes(set(known_passes()) - drawn):
        assert reason_to_exclude(pass_class.name)


def test_minimize_keeps_what_the_failure_needs() -> None:
    case = next(
        case
        for case in draw_cases(1)
        if len(case.passes) > 1 and sum(map(len, case.step.blocks)) > 2 and case.step.tied
    )
    needed = case.passes[-1]

    def fails(smaller: Case) -> bool:
        return needed.name in [spec.name for spec in smaller.passes] and smaller.step.tied

    small = minimize(case, fails, num_trials=1000)
    seed = case.step.seed
    assert small == Case(step=StepSpec(seed=seed, tied=True), passes=(PassSpec(name=needed.name),))


def test_minimize_gives_up_after_so_many_trials() -> None:
    tried: list[Case] = []

    def never(smaller: Case) -> bool:
        tried.append(smaller)
        return False

    case = next(draw_cases(1))
    assert minimize(case, never, num_trials=3) == case
    assert len(tried) == 3


def test_replay_of_a_stored_case_tells_its_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "case.json"
    path.write_text(Case(step=STEP, passes=(PassSpec(name="canonicalize-views"),)).to_json())
    assert main(["--replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith(
        "equal: step of seed 3, 2 ranks, shard: norm\n  passes: canonicalize-views\n"
    )
