"""The one result format of all benchmarks: a table for people, a JSON file for everything else.

The format is described in README.md beside this file. ``ratio`` is ours / peer; a count that has no
peer has neither.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Report", "Row", "Sample"]

_PACKAGES = (
    "torch",
    "torchtitan",
    "gt-config",
    "gt-trace",
    "gt-passes",
    "gt-pipeline",
    "gt-autoparallel",
    "gt-trainer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Repeated measurements of one quantity, told as median, minimum and maximum."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one measurement")

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        return cls(values=tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.median:.3f}"
        return f"{self.median:.3f} [{min(self.values):.3f}, {max(self.values):.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of one workload: ours, and one peer's."""

    workload: str
    metric: str
    unit: str
    ours: Sample
    peer: Sample | None = None
    peer_name: str | None = None
    goal: float | None = None
    """The largest ratio that we would be content with."""
    at_most: float | None = None
    """The largest value of ours that we would be content with, in the row's unit."""
    simulated: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours / peer; None without a peer, or where the peer's is 0."""
        if self.peer is None or self.peer.median == 0:
            return None
        return self.ours.median / self.peer.median

    @property
    def is_small_enough(self) -> bool:
        """Whether ours is at most ``at_most``, but for rounding; True without it."""
        return self.at_most is None or self.ours.median <= self.at_most * (1 + 1e-9)

    def to_record(self) -> dict[str, Any]:
        """The row as it stands in the JSON file."""
        record: dict[str, Any] = {
            "workload": self.workload,
            "metric": self.metric,
            "unit": self.unit,
            "ours": self.ours.median,
            "peer": None if self.peer is None else self.peer.median,
            "peer_name": self.peer_name,
            "ratio": self.ratio,
            "ours_min_max": [min(self.ours.values), max(self.ours.values)],
            "num_samples": len(self.ours.values),
        }
        if self.peer is not None:
            record["peer_min_max"] = [min(self.peer.values), max(self.peer.values)]
        if self.goal is not None:
            record["goal"] = self.goal
            record["goal_met"] = self.ratio is not None and self.ratio <= self.goal
        if self.at_most is not None:
            record["at_most"] = self.at_most
            record["at_most_met"] = self.is_small_enough
        if self.simulated:
            record["simulated"] = True
        return record


@dataclass(slots=True, kw_only=True)
class Report:
    """All rows of one run of one benchmark."""

    benchmark: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know to trust the rows: checks that passed, conditions of the run."""

    earlier: dict[str, list[Any]] = field(default_factory=dict)
    """Notes and rows, as records, of an earlier run of the same day."""

    def continue_from(self, path: Path) -> None:
        """Take over what a file has, before this run's come to it.

        Of a workload that this run has too, or has a note of ("workload: ..."), nothing is kept.

        Args:
            path: of a file that this benchmark wrote today, with the same versions.

        Raises:
            ValueError: it does not exist, or is of another benchmark, day or version.
        """
        if not path.is_file():
            raise ValueError(f"{path} does not exist, and nothing can be added to it")
        found, own = json.loads(path.read_text()), self.to_record()
        differing = [key for key in ("benchmark", "date", "versions") if found[key] != own[key]]
        if differing:
            raise ValueError(f"{path} is not of this run's {' and '.join(differing)}")
        self.earlier = {key: found[key] for key in ("notes", "rows")}

    def table(self) -> str:
        """The rows in columns, one workload after another."""
        header = ("metric", "unit", "ours", "peer's", "peer", "ratio", "goal")
        blocks = []
        for workload in dict.fromkeys(row.workload for row in self.rows):
            cells = [header, *(_cells(row) for row in self.rows if row.workload == workload)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = [
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                for line in cells
            ]
            lines.insert(1, "  ".join("-" * width for width in widths))
            blocks.append("\n".join([workload, *(line.rstrip() for line in lines)]))
        if any(row.simulated for row in self.rows):
            blocks.append("(simulated) rows come from a model of the hardware, not from a clock")
        return "\n\n".join([*blocks, *self.notes])

    def to_record(self) -> dict[str, Any]:
        """The report as the JSON file holds it."""
        own = {row.workload for row in self.rows} | {_subject(note) for note in self.notes}
        notes = [note for note in self.earlier.get("notes", ()) if _subject(note) not in own]
        rows = [row for row in self.earlier.get("rows", ()) if row["workload"] not in own]
        return {
            "benchmark": self.benchmark,
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "machine": _machine(),
            "versions": _versions(),
            "notes": [*notes, *self.notes],
            "rows": [*rows, *(row.to_record() for row in self.rows)],
        }

    def write(self, path: Path) -> None:
        """Write the JSON file; its folder is made if missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_record(), indent=1) + "\n")


def _subject(note: str) -> str:
    return note.partition(": ")[0]


def _cells(row: Row) -> tuple[str, ...]:
    ratio, goal = row.ratio, ""
    if row.goal is not None:
        met = "met" if ratio is not None and ratio <= row.goal else "missed"
        goal = f"<= {row.goal:g}: {met}"
    if row.at_most is not None:
        met = "met" if row.is_small_enough else "missed"
        goal += f"{', ' if goal else ''}<= {row.at_most:g} {row.unit}: {met}"
    return (
        row.metric + (" (simulated)" if row.simulated else ""),
        row.unit,
        str(row.ours),
        "" if row.peer is None else str(row.peer),
        row.peer_name or "",
        "" if ratio is None else f"{ratio:.2f}",
        goal,
    )


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "(from its sources)"
    return versions
