"""What a dump folder says of its run, read without torch. A run may still be writing to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt_trainer.metrics.metrics_history import METRICS_FILE, VALIDATION_FILE, read_metrics
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


# The form of what a run writes into its dump folder, as far as a report reads it.
#
# A form is a kind of value, a list with the form of its items, or a dictionary of forms by key.
# A key that ends with ``?`` may be missing; the key ``*`` is for every key.
_COUNT, _NUMBER, _TEXT, _TIME = "a whole number", "a number", "a text", "a time"
_MAX_COUNT = 10**18
_MAX_TIME = 10**11
"""Seconds since 1970 of the year 5138; ``time.gmtime`` knows some more."""

_COUNTS = {"*": _COUNT}
_BY_LAYER = {"*": _COUNTS}

STEP: Mapping[str, Any] = {
    "step": _COUNT,
    "loss": _NUMBER,
    "grad_norm?": _NUMBER,
    "tokens_per_second?": _NUMBER,
    "memory_gib?": _NUMBER,
}
"""A line of ``metrics.jsonl``."""

VALIDATION: Mapping[str, Any] = {"step": _COUNT, "validation_loss": _NUMBER}
START: Mapping[str, Any] = {"step": _COUNT, "time": _TIME, "compile?": {}}
STARTUP: Mapping[str, Any] = {"*": _NUMBER}
_PASS = {
    "pass": _TEXT,
    "operators": (_COUNT, _COUNT),
    "collective_bytes": (_COUNT, _COUNT),
    "done": {"*": _NUMBER},
    "refused": [_TEXT],
    "operator_differences?": _COUNTS,
}
CAPTURE: Mapping[str, Any] = {
    "captured": _TEXT,
    "graphs": [[_PASS]],
    "memory": (_TEXT, None),
    "layers?": [_BY_LAYER],
    "by_layer?": [{"before": (_BY_LAYER, None), "after": (_BY_LAYER, None)}],
}
"""An item of ``captures.json``."""


def problems_of(found: Any, form: Any, where: str = "it") -> Iterator[str]:
    """Yield, in words, where a value has another form."""
    if isinstance(form, str):
        if not _is(found, form):
            yield f"{where} is {_shown(found)}, not {form}"
    elif isinstance(form, tuple) and form[1] is None:
        if found is not None:
            yield from problems_of(found, form[0], where)
    elif isinstance(form, tuple):
        if not isinstance(found, list) or len(found) != len(form):
            yield f"{where} is {_shown(found)}, not a list of {len(form)}"
            return
        for place, (each, of_it) in enumerate(zip(found, form, strict=True)):
            yield from problems_of(each, of_it, f"{where}[{place}]")
    elif isinstance(form, list):
        if not isinstance(found, list):
            yield f"{where} is {_shown(found)}, not a list"
            return
        for place, each in enumerate(found):
            yield from problems_of(each, form[0], f"{where}[{place}]")
    elif not isinstance(found, dict):
        yield f"{where} is {_shown(found)}, not an object"
    else:
        for key, of_it in form.items():
            if key == "*":
                for name, each in found.items():
                    yield from problems_of(each, of_it, f"{where}[{name[:40]!r}]")
            elif (name := key.removesuffix("?")) in found:
                yield from problems_of(found[name], of_it, f"{where}[{name!r}]")
            elif name == key:
                yield f"{where} has no {name!r}"


def _is(found: Any, kind: str) -> bool:
    if kind == _TEXT:
        return isinstance(found, str)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    if kind == _TIME:
        return 0 <= found <= _MAX_TIME
    if kind == _COUNT:
        return isinstance(found, int) and abs(found) <= _MAX_COUNT
    return (isinstance(found, float) and not math.isfinite(found)) or abs(found) <= 1e300


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
