"""What does a start cost that finds what an earlier one stored, and how many graphs do ranks need?

::

    python benchmarks/bench_artifacts.py [--json FILE] [--samples 3] [--workloads 8B 405B]
                                         [--questions load groups compiled]

- ``load``: Llama 3 405B with 126 layers on 1,024 ranks, of which none exists, captured (stamped),
  rewritten and verified; and the same read, decoded and verified. Each start in a process of its
  own, in turn. Models are built and placed in both, which is not counted, nor are imports.
- ``groups``: on 1,024 ranks, how many graphs those of 405B need, and those of each pipeline stage
  of DeepSeek-V3 671B. Distinct stages are looked at, once each.
- ``compiled``: a small model, compiled as a whole by Inductor for the CPU; and started again with
  what the first start stored, and an empty cache of Inductor's. C++ compilers count, imports do
  not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from artifacts.grouped_workloads import GROUPED
from own_process import record_of
from report import Report, Row, Sample

_LAYERS = {"8B": 32, "405B": 126}
_GOAL = 0.15
_COMPILED_GOAL = 0.1
_MOST_GROUPS = 2
_QUESTIONS = ("load", "groups", "compiled")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--samples", type=int, default=3, help="of each start (default: 3)")
    parser.add_argument("--workloads", nargs="*", choices=list(_LAYERS), default=list(_LAYERS))
    parser.add_argument("--questions", nargs="*", choices=_QUESTIONS, default=_QUESTIONS)
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    report = Report(benchmark="artifacts")
    if "load" in options.questions:
        for workload in options.workloads:
            _compare(workload, report, num_samples=options.samples)
    if "groups" in options.questions:
        for workload in GROUPED:
            _count_groups(workload, report)
    if "compiled" in options.questions:
        _compare_compiled(report, num_samples=options.samples)
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _compare(workload: str, report: Report, *, num_samples: int) -> None:
    captured, loaded = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step"
        for _ in range(num_samples):
            captured.append(_start("capture", workload, file))
            loaded.append(_start("load", workload, file))
    title = f"llama3 {workload}, {_LAYERS[workload]} layers"
    capture = Sample.of([each["parts"]["capture and passes"] for each in captured])
    load = Sample.of([sum(each["parts"].values()) for each in loaded])
    report.rows.append(
        Row(
            workload=title,
            metric="artifact_load",
            unit="CPU s",
            ours=load,
            peer=capture,
            peer_name="capture, passes, verification",
            goal=_GOAL if workload == "405B" else None,
        )
    )
    for part, starts in (("read and decode", loaded), ("verify", loaded), ("write", captured)):
        report.rows.append(
            Row(
                workload=title,
                metric=f"artifact_{part.replace(' ', '_')}",
                unit="CPU s",
                ours=Sample.of([each["parts"][part] for each in starts]),
            )
        )
    size = captured[0]["file_bytes"]
    report.notes.append(
        f"{title}: {captured[0]['nodes']:,} nodes in {size / 1e6:.1f} MB; loaded and verified: "
        f"{loaded[0]['nodes']:,} nodes"
    )


def _count_groups(workload: str, report: Report) -> None:
    found = record_of("artifacts.rank_groups", workload)
    for graph, counts in found["graphs"].items():
        report.rows.append(
            Row(
                workload=workload,
                metric=f"groups, {graph}",
                unit="graphs",
                ours=Sample.of([counts["groups"]]),
                peer=Sample.of([counts["ranks"]]),
                peer_name="ranks",
                goal=_MOST_GROUPS / counts["ranks"],
            )
        )
        report.notes.append(f"{workload}, {graph}: {counts['text']}")
    report.notes.append(f"{workload}: found in {found['cpu_seconds']:.0f} CPU s")


def _compare_compiled(report: Report, *, num_samples: int) -> None:
    starts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(num_samples):
        with tempfile.TemporaryDirectory() as artifacts:
            for is_warm in (False, True):
                start = record_of("artifacts.compiled_start", artifacts)
                if start["is_loaded"] != is_warm:
                    raise RuntimeError(f"a start was to be warm: {is_warm}, and was not: {start}")
                starts[is_warm].append(start)
    cold, warm = (
        Sample.of([each["cpu_seconds"] - each["imports"] for each in starts[is_warm]])
        for is_warm in (False, True)
    )
    report.rows.append(
        Row(
            workload="llama3 debug model, Inductor for the whole graph, CPU",
            metric="compiled_start",
            unit="CPU s",
            ours=warm,
            peer=cold,
            peer_name="the start that compiles",
            goal=_COMPILED_GOAL,
        )
    )
    imports = Sample.of([each["imports"] for group in starts.values() for each in group])
    report.notes.append(f"compiled_start: imports, not counted, are {imports} CPU s")


def _start(way: str, workload: str, file: Path) -> dict[str, Any]:
    """One start in a process of its own."""
    return record_of("artifacts.one_start", way, workload, str(_LAYERS[workload]), str(file))


if __name__ == "__main__":
    sys.exit(main())
