"""``python -m fuzz.captures``: random steps, eagerly and captured, compared to the last bit.

Exits with 1 if a captured step computed something else, ended in an error that is not gt-trace's,
or left the model broken. The smallest failing cases are printed as JSON.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fuzz.capture_case import CaptureCase, CaptureVerdict, draw_capture_case, judge_capture

__all__ = ["CaptureReport", "draw_capture_cases", "main", "run_captures", "smallest"]

_FAILURES_OF_A_KIND = 2


@dataclass(slots=True)
class CaptureReport:
    """Counts of a campaign, and its failures."""

    num_by_outcome: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """First lines of refusals."""

    failures: list[tuple[CaptureCase, CaptureVerdict]] = field(default_factory=list)

    @property
    def num_failures(self) -> int:
        """Number of cases that break the promise."""
        return sum(
            count
            for outcome, count in self.num_by_outcome.items()
            if outcome not in ("equal", "refused", "no case")
        )

    def __str__(self) -> str:
        """Return the counts as lines for a terminal."""
        counts = ", ".join(f"{name} {count}" for name, count in self.num_by_outcome.most_common())
        refused = (f"  refused {count}: {text}" for text, count in self.refusals.most_common(12))
        return "\n".join([f"captures: {counts}", *refused])


def draw_capture_cases(seed: int) -> Iterator[CaptureCase]:
    """Draw cases without end; the same for the same seed."""
    number = 0
    while True:
        yield draw_capture_case(random.Random(f"{seed}/{number}"))
        number += 1


def run_captures(num_cases: int, *, seed: int, say: Callable[[str], None]) -> CaptureReport:
    """Judge cases until ``num_cases`` have been; cases that eager PyTorch refuses do not count.

    Args:
        num_cases: cases to judge.
        seed: seed of all cases.
        say: receives progress and failures, a line each.
    """
    report = CaptureReport()
    kinds: Counter[tuple[str, str]] = Counter()
    begin = last = time.monotonic()
    for case in draw_capture_cases(seed):
        judged = report.num_by_outcome.total() - report.num_by_outcome["no case"]
        if judged == num_cases:
            break
        verdict = judge_capture(case)
        report.num_by_outcome[verdict.outcome] += 1
        if verdict.outcome == "refused":
            report.refusals[verdict.details.partition("\n")[0][:100]] += 1
        if verdict.is_failure:
            small, found = smallest(case, verdict)
            last_kind = small.layers[-1][-1].kind if small.layers and small.layers[-1] else ""
            kinds[(found.outcome, last_kind)] += 1
            say(f"{found.outcome}: {small.describe()}\n    {found.details[:300]}")
            if kinds[(found.outcome, last_kind)] <= _FAILURES_OF_A_KIND:
                report.failures.append((small, found))
        if time.monotonic() - last > 20:
            last = time.monotonic()
            say(f"{judged} of {num_cases} captures, {last - begin:.0f} s")
    return report


def smallest(case: CaptureCase, verdict: CaptureVerdict) -> tuple[CaptureCase, CaptureVerdict]:
    """Leave out all that the failure does not need."""
    found = True
    while found:
        found = False
        for smaller in _smaller(case):
            tried = judge_capture(smaller)
            if tried.outcome == verdict.outcome:
                case, verdict, found = smaller, tried, True
                break
    return case, verdict


def _smaller(case: CaptureCase) -> Iterator[CaptureCase]:
    for number, layer in enumerate(case.layers):
        before, after = case.layers[:number], case.layers[number + 1 :]
        if before or after:
            yield replace(case, layers=before + after)
        for position in range(len(layer)):
            if len(layer) > 1:
                kept = layer[:position] + layer[position + 1 :]
                yield replace(case, layers=(*before, kept, *after))
    if case.policy != "as captured":
        yield replace(case, policy="as captured")
    if case.ambient_autocast:
        yield replace(case, ambient_autocast=False)
    if case.num_calls_before:
        yield replace(case, num_calls_before=0)
    if {case.captured_layout, *case.layouts} != {"contiguous"}:
        yield replace(case, captured_layout="contiguous", layouts=("contiguous",) * 2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz.captures", description=__doc__)
    parser.add_argument("--num-cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="judge one stored case instead")
    options = parser.parse_args(arguments)
    if options.num_cases < 1:
        parser.error("--num-cases must be at least 1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.replay is not None:
        case = CaptureCase.from_json(options.replay.read_text())
        verdict = judge_capture(case)
        print(f"{verdict.outcome}: {case.describe()}\n{verdict.details}")
        return int(verdict.is_failure)
    report = run_captures(options.num_cases, seed=options.seed, say=_say)
    for case, verdict in report.failures:
        print(f"\n{verdict.outcome.upper()}: {case.describe()}\n{verdict.details}")
        print(case.to_json())
    print(f"\nseed {options.seed}: {report}")
    return int(report.num_failures > 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
