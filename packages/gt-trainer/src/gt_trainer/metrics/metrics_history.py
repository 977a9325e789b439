"""`metrics.jsonl`: one JSON object a step, exact, and one coherent history across resumes.

Floats are written with Python's repr, which reads back as the same float to the last bit. JSON
has no infinity and no NaN: those are written as the strings "Infinity", "-Infinity" and "NaN"
(as in protobuf's JSON mapping), so every line is strict JSON and `float(value)` gives the number
back in all cases.

A file belongs to one run at a time. A run that starts at step 1 replaces what an earlier one
left; a run that resumes after step N keeps the lines up to N and drops the later ones, which
its checkpoint never saw. The rewrite goes to a temporary file and replaces the old one in one
step: a crash leaves the old history or the new one, never half of each.

Standard library only: reading a run's history needs no torch.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from gt_trainer.launcher import RunStoppedError
from gt_trainer.run_files import STARTS_FILE

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"


class MetricsFileError(RunStoppedError, OSError):
    """A metrics file cannot be written."""


class MetricsHistoryError(RunStoppedError, ValueError):
    """A metrics file that should be continued is not one of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What is known of one optimizer step, over all ranks unless said otherwise.

    Args:
        step: The step, from 1.
        loss: Mean over all tokens.
        grad_norm: Norm of the gradient before clipping.
        max_loss: Largest mean loss of a data-parallel rank.
        tokens_per_second: Tokens of all ranks a second, since the last step reported.
        seconds: Wall time of a step, on average since the last one reported.
        lr: Learning rate of the first parameter group.
        n_tokens_seen: Tokens trained on since step 1, by all ranks.
        memory_gib: Peak memory reserved on this rank's device since the last report, in GiB.
    """

    step: int
    loss: float
    grad_norm: float
    max_loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    lr: float | None = None
    n_tokens_seen: int | None = None
    memory_gib: float | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the fields that are known, in order, as a line of `metrics.jsonl` has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class MetricsHistory:
    """Appends one record a line to a file, each flushed when written.

    Nothing is touched before the first `resume` or `write`.

    Args:
        path: The file; its folder is made if missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def resume(self, *, after_step: int) -> None:
        """Keep the lines up to `after_step` (0: none) and continue behind them.

        Raises:
            MetricsFileError: The file or its folder cannot be written.
            MetricsHistoryError: A line is not a record (a torn last line is dropped: it is what
                a killed run leaves).
        """
        self.close()
        kept = [line for step, line in _records(self.path) if step <= after_step]
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{line}\n" for line in kept)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise _cannot_write(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; the first one also drops earlier lines from its step on.

        Args:
            record: Values that JSON knows; "step" is required.

        Raises:
            MetricsFileError: The file cannot be written.
            MetricsHistoryError: As in `resume`, or the record has no integer step.
        """
        step = record.get("step")
        if not isinstance(step, int):
            raise MetricsHistoryError(f"a metrics record needs an integer step; it has {step!r}")
        if self._file is None:
            self.resume(after_step=step - 1)
        assert self._file is not None
        line = json.dumps({key: _strict(value) for key, value in record.items()}, allow_nan=False)
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file; a later `write` continues it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file, non-finite numbers as floats again.

    Raises:
        MetricsHistoryError: A line other than a torn last one is not a record.
    """
    non_finite = {"Infinity", "-Infinity", "NaN"}
    return [
        {
            key: float(value) if isinstance(value, str) and value in non_finite else value
            for key, value in json.loads(line).items()
        }
        for _, line in _records(Path(path))
    ]


def check_writable(folder: str | Path) -> None:
    """Refuse an output folder that nothing can be written to, before work is put into a run.

    Raises:
        MetricsFileError: The folder cannot be made, or no file can be made in it.
    """
    path = Path(folder)
    probe = path / f".write-probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from error


def _records(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (step, line) of every whole line."""
    try:
        if not path.exists():
            return
        if not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        content = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise _cannot_write(path, error) from error
    whole_lines = content.split("\n")[:-1]  # what follows the last newline is empty or torn
    for number, line in enumerate(whole_lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise MetricsHistoryError(
                f"{str(path)!r}, line {number} is not a metrics record: {line[:80]!r}; move the "
                "file away, or choose another --dump_folder"
            )
        yield record["step"], line


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _cannot_write(path: Path, error: OSError) -> MetricsFileError:
    reason = error.strerror or str(error)
    return MetricsFileError(f"cannot write {str(path)!r} ({reason}); choose another --dump_folder")


def record_start(folder: Path, *, step: int, facts: dict[str, object]) -> None:
    """Add this start to those before it; later ones, from which nothing is left, are dropped.

    Args:
        folder: the dump folder.
        step: the first that this start trains, from 1.
        facts: what was started, as values that JSON knows.

    Raises:
        MetricsFileError: the file cannot be written.
        MetricsHistoryError: it is not one of ours.
    """
    history = MetricsHistory(folder / STARTS_FILE)
    history.write({"step": step, "time": time.time(), **facts})
    history.close()
