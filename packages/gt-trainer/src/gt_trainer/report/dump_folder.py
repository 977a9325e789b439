"""What a dump folder says of its run, read without torch. A run may still be writing to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt_trainer.metrics.metrics_history import METRICS_FILE, VALIDATION_FILE, read_metrics
from gt_trainer.report.written_form import (
    CAPTURE,
    START,
    STARTUP,
    STEP,
    VALIDATION,
    problems_of,
)
from gt_trainer.run_files import CAPTURES_FILE, STARTS_FILE, STARTUP_FILE

_TRACES: Mapping[str, str] = {
    "profiling/traces/**/*.json*": "profiler trace: open in ui.perfetto.dev",
    "profiling/memory_snapshot/**/*.pickle": "memory snapshot: open in pytorch.org/memory_viz",
    "structured_logs/**/*.jsonl": "torchtitan's structured log",
    "graph_passes/**/summary.txt": "graphs before and after each pass",
    "placement.html": "the plan that the solver found",
    "logs/rank_*.log": "what a rank said",
    "tb/**/events.out.*": "TensorBoard",
}
"""Files that have more to say, by where they are, and what they are."""


class ReportError(ValueError):
    """There is no run to report on, or what it left cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedFile:
    """A file of the run that the page leads to."""

    path: str
    """In the dump folder, with forward slashes."""

    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that is known of a run."""

    folder: Path
    steps: Sequence[Mapping[str, Any]]
    """As ``metrics.jsonl`` has them."""

    validations: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]
    """In the order of the steps that they began with; empty of a run that kept none."""

    startup: Mapping[str, float]
    captures: Sequence[Mapping[str, Any]]
    files: Sequence[LinkedFile]

    @property
    def restarts(self) -> tuple[int, ...]:
        """The steps that starts after the first one began with."""
        return tuple(each["step"] for each in self.starts[1:])


def read_run(folder: Path) -> RunRecord:
    """Read the dump folder of a run.

    Raises:
        ReportError: it is no dump folder, or one of its files is not what a run writes.
    """
    if not (folder / METRICS_FILE).is_file():
        raise ReportError(
            f"{str(folder)!r} has no {METRICS_FILE}: give the --dump_folder of a run that has "
            "trained a step"
        )
    try:
        found = RunRecord(
            folder=folder,
            steps=_checked(METRICS_FILE, read_metrics(folder / METRICS_FILE), [STEP]),
            validations=_checked(
                VALIDATION_FILE, read_metrics(folder / VALIDATION_FILE), [VALIDATION]
            ),
            starts=_checked(STARTS_FILE, read_metrics(folder / STARTS_FILE), [START]),
            startup=_checked(STARTUP_FILE, _read(folder / STARTUP_FILE, otherwise={}), STARTUP),
            captures=_checked(
                CAPTURES_FILE, _read(folder / CAPTURES_FILE, otherwise=[]), [CAPTURE]
            ),
            files=tuple(_linked_files(folder)),
        )
    except (OSError, ValueError) as error:
        raise ReportError(f"the run in {str(folder)!r} cannot be read: {error}") from None
    return found


def _read(path: Path, *, otherwise: Any) -> Any:
    if not path.is_file():
        return otherwise
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path.name} is not JSON ({error})") from None


def _checked(name: str, found: Any, expected: object) -> Any:
    for problem in problems_of(found, expected):
        raise ReportError(f"{name} is not what a run writes: {problem}")
    return found


def _linked_files(folder: Path) -> list[LinkedFile]:
    return [
        LinkedFile(path=path.relative_to(folder).as_posix(), meaning=meaning)
        for pattern, meaning in _TRACES.items()
        for path in sorted(folder.glob(pattern))
    ]
