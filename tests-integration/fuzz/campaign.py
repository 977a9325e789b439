"""Many cases from one seed: tried, counted, and the failing ones made small.

A case is a pair (step, list of passes). Capturing is the expensive part, so each step is captured
once and tried with several lists of passes, each of which counts.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fuzz.case import Case
from fuzz.draw import draw_step
from fuzz.minimize import minimize
from fuzz.pass_lists import draw_passes
from fuzz.verdict import BAD_OUTCOMES, Judge, Verdict

__all__ = ["LISTS_PER_STEP", "CampaignReport", "Failure", "draw_cases", "run_campaign"]

LISTS_PER_STEP = 10
_STEPS_PER_FOUR_RANKS = 6
_FAILURES_OF_A_KIND = 3
"""So many are made smaller; more of the same kind with the same passes teach little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that failed, as small as it got."""

    case: Case
    verdict: Verdict


@dataclass(slots=True)
class CampaignReport:
    """What a campaign found."""

    num_cases: int = 0
    num_changed: int = 0
    """Of those, in how many a pass changed the graph."""

    num_steps: int = 0
    num_not_captured: int = 0
    """Steps that were drawn and could not be captured; they count as no case."""

    num_by_outcome: Counter[str] = field(default_factory=Counter)
    pass_counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        """The counts as lines for a terminal."""
        bad = {name: count for name, count in self.num_by_outcome.items() if name != "equal"}
        counts = (
            f"{self.num_cases} cases ({self.num_steps} steps, each with up to {LISTS_PER_STEP} "
            f"lists of passes) in {self.seconds:.0f} s; {self.num_changed} changed the graph; "
            f"{self.num_not_captured} steps drawn in vain"
        )
        lines = [
            counts,
            "  " + ", ".join(f"{name} {count}" for name, count in sorted(self.pass_counts.items())),
            f"  equal in every bit: {self.num_by_outcome['equal']}",
        ]
        lines += [
            f"  {name}: {bad[name]} ({why})" for name, why in BAD_OUTCOMES.items() if name in bad
        ]
        return "\n".join(lines)


def draw_cases(seed: int, *, lists_per_step: int = LISTS_PER_STEP) -> Iterator[Case]:
    """Cases without end; the same for the same seed and the same registered passes."""
    number = 0
    while True:
        source = random.Random(f"{seed}/{number}")
        step = draw_step(source, four_ranks=number % _STEPS_PER_FOUR_RANKS == 5)
        for _ in range(lists_per_step):
            yield Case(step=step, passes=draw_passes(source))
        number += 1


def run_campaign(
    judge: Judge,
    *,
    num_cases: int,
    seed: int,
    say: Callable[[str], None],
    lists_per_step: int = LISTS_PER_STEP,
) -> CampaignReport:
    """Try cases until ``num_cases`` have been, and make those that fail small.

    Args:
        judge: tries them.
        num_cases: steps that cannot be captured do not count.
        seed: of everything drawn.
        say: told about failures as they come, and about progress.
        lists_per_step: how many lists of passes are tried with one step.
    """
    report = CampaignReport()
    begin = time.monotonic()
    last_step, last_said = None, begin
    looked_into: Counter[object] = Counter()
    for case in draw_cases(seed, lists_per_step=lists_per_step):
        if report.num_cases == num_cases:
            break
        verdict = judge.judge(case)
        is_new_step, last_step = case.step != last_step, case.step
        if verdict.outcome == "no case":
            report.num_not_captured += is_new_step
            continue
        report.num_steps += is_new_step
        report.num_cases += 1
        report.num_changed += verdict.changed
        report.num_by_outcome[verdict.outcome] += 1
        report.pass_counts.update({graph_pass.name for graph_pass in case.passes})
        if verdict.is_failure:
            kind = (verdict.outcome, _first_line(verdict))
            looked_into[kind] += 1
            say(f"{verdict.outcome}: {case.describe()}")
            if looked_into[kind] <= _FAILURES_OF_A_KIND:
                report.failures.append(_small(case, verdict, judge))
        report.seconds = time.monotonic() - begin
        if time.monotonic() - last_said > 20:
            last_said = time.monotonic()
            say(f"{report.num_cases} of {num_cases} cases, {report.seconds:.0f} s")
    return report


def _small(case: Case, verdict: Verdict, judge: Judge) -> Failure:
    last = [verdict]

    def fails(smaller: Case) -> bool:
        tried = judge.judge(smaller)
        if tried.outcome != verdict.outcome:
            return False
        last[0] = tried
        return True

    small = minimize(case, fails, num_trials=12 if verdict.outcome == "hang" else 120)
    return Failure(case=small, verdict=last[0])


def _first_line(verdict: Verdict) -> str:
    """What failures of one kind have in common: what the verifier or an exception says."""
    if verdict.outcome == "crash":
        return verdict.details.strip().splitlines()[-1]
    return verdict.details.partition("\n")[0] if verdict.outcome != "silent difference" else ""
