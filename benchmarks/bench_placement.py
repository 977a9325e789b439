"""How long does planning take, from a model to an audited plan, and how much memory?

Each workload runs in a process of its own: a model on meta, captured, planned and audited::

    python benchmarks/bench_placement.py [--json FILE] [--workload llama3_8b] [--repeats 3]

``total_seconds`` is the clock from the model to the audited plan, ``solve_seconds`` the solver's
part of it, ``peak_gib`` the largest resident memory of the process, imports included. Processor
seconds (``*_cpu_seconds``) stand beside the clock's, for machines that are shared. The warm
re-plan asks the same planner again with a memory budget and with other constraints. Published
figures of today's system, measured on a machine like ours, stand beside those of Llama 3 8B on
8 x 8: they are the goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import Report, Row, Sample

_NAMES = ("llama3_8b 8x8", "llama3_8b 64", "llama3_405b 8x4x2")

_PEER = "AutoParallel (2026-06, published)"
_PEERS = {
    ("llama3_8b 8x8", "total_seconds"): 197.0,
    ("llama3_8b 8x8", "solve_seconds"): 103.0,
    ("llama3_8b 8x8", "peak_gib"): 5.65,
}
_GOALS = {
    ("llama3_8b 8x8", "total_seconds"): 60.0,
    ("llama3_8b 8x8", "solve_seconds"): 10.0,
    ("llama3_8b 8x8", "peak_gib"): 2.5,
}
_UNITS = {"peak_gib": "GiB", "plan_gib": "GiB", "gap": "1", "objective_us": "us", "num_nodes": "1"}


def main() -> int:
    """Run the workloads, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workload", default="", help="run those whose name begins like this")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    report = Report(benchmark="placement")
    for name in _NAMES:
        if not name.startswith(arguments.workload):
            continue
        runs = [_run(name) for _ in range(arguments.repeats)]
        for metric in runs[0]["metrics"]:
            report.rows.append(_row(name, metric, [run["metrics"][metric] for run in runs]))
        report.notes += [f"{name}: {note}" for note in runs[0]["notes"]]
    print(report.table())
    if arguments.json is not None:
        report.write(arguments.json)
    return 0


def _run(name: str) -> dict[str, Any]:
    """One workload in a process of its own."""
    command = [sys.executable, "-m", "placement.measured_plan", name]
    finished = subprocess.run(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
    )
    record: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return record


def _row(name: str, metric: str, values: list[float]) -> Row:
    peer, goal = _PEERS.get((name, metric)), _GOALS.get((name, metric))
    return Row(
        workload=name,
        metric=metric,
        unit=_UNITS.get(metric, "s"),
        ours=Sample.of(values),
        peer=None if peer is None else Sample.of([peer]),
        peer_name=None if peer is None else _PEER,
        goal=None if peer is None or goal is None else goal / peer,
        simulated=metric in ("objective_us", "plan_gib"),
    )


if __name__ == "__main__":
    sys.exit(main())
