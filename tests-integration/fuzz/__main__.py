"""``python -m fuzz``: a campaign, or one case from a file.

Exits with 1 if a case failed. Failing cases are made small and stored as regression tests, which
``test_pass_fuzz.py`` replays from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from fuzz.campaign import Failure, run_campaign
from fuzz.case import Case
from fuzz.verdict import Judge

REGRESSIONS = Path(__file__).resolve().parent / "regressions"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Differential fuzzing of passes.")
    parser.add_argument("--num-cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a hang is one")
    parser.add_argument("--save-to", type=Path, default=REGRESSIONS, metavar="FOLDER")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try one stored case instead")
    options = parser.parse_args(arguments)
    if options.num_cases < 1:
        parser.error("--num-cases must be at least 1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Judge(timeout=options.timeout) as judge:
        if options.replay is not None:
            return _replay(options.replay, judge)
        report = run_campaign(judge, num_cases=options.num_cases, seed=options.seed, say=_say)
    for failure in report.failures:
        print(f"\n{failure.verdict.outcome.upper()}, made small: {failure.case.describe()}")
        print(failure.verdict.details)
        print(f"stored as {_save(failure, options.save_to)}")
    print(f"\nseed {options.seed}: {report}")
    return 1 if report.num_by_outcome.total() != report.num_by_outcome["equal"] else 0


def _replay(path: Path, judge: Judge) -> int:
    case = Case.from_json(path.read_text())
    verdict = judge.judge(case)
    print(f"{verdict.outcome}: {case.describe()}\n{verdict.details}")
    return 0 if verdict.outcome == "equal" else 1


def _save(failure: Failure, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = failure.case.to_json()
    kind = failure.verdict.outcome.replace(" ", "-")
    last = failure.case.passes[-1].name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = folder / f"{kind}-{last}-{digest}.json"
    path.write_text(text)
    return path


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
