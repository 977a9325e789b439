"""What does a start cost that loads its captured step from a file, beside one that captures it?

Each start in a process of its own, in turn: Llama 3 405B with 126 layers on 1,024 ranks, of which
none exists, captured (stamped), rewritten and verified; and the same read, decoded and verified::

    python benchmarks/bench_artifacts.py [--json FILE] [--samples 3] [--workloads 8B 405B]

Models are built and placed in both, which is not counted, nor are imports.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from own_process import record_of
from report import Report, Row, Sample

_LAYERS = {"8B": 32, "405B": 126}
_GOAL = 0.15


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--samples", type=int, default=3, help="of each start (default: 3)")
    parser.add_argument("--workloads", nargs="*", choices=list(_LAYERS), default=list(_LAYERS))
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    report = Report(benchmark="artifacts")
    for workload in options.workloads:
        _compare(workload, report, num_samples=options.samples)
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


def _start(way: str, workload: str, file: Path) -> dict[str, Any]:
    """One start in a process of its own."""
    return record_of("artifacts.one_start", way, workload, str(_LAYERS[workload]), str(file))


if __name__ == "__main__":
    sys.exit(main())
