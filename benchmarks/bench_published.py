"""How far are simulated runs from what was published of them?

Each row is a run of torchtitan's report of December 2024 on 8 to 512 H100, written down as a
command line (``gt_trainer.models.published_runs``), and dry-run at its size, on its machine::

    python benchmarks/bench_published.py [--json FILE] [--workload 405b] [--held-out]

``--held-out`` takes the rows of other reports in their place (``gt_trainer.models.held_out_runs``).
The machine's constants come from other sources. Those of all H100s were fixed before the first of
these rows was simulated (docs/decisions/0007-cost-model.md), two of the 500 W card on 2026-11-26,
when the rows were known (docs/decisions/0066-accuracy.md). Most rows need gt-trainer[float8].
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from own_process import record_of
from report import Report, Row, Sample

from gt_trainer.models.held_out_runs import HELD_OUT_RUNS
from gt_trainer.models.published_runs import PUBLISHED_RUNS, PublishedRun

_MEDIAN_ERROR, _WORST_ERROR, _MEMORY_ERROR = 0.10, 0.25, 0.15
_SECONDS = 15 * 60
_AT_ONCE = 2  # rows, of up to 2 GiB each


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    report = Report(benchmark="published")
    report.notes.append(
        "All rows are simulated, each on the machine of its source. Goals: error of throughput "
        f"{_MEDIAN_ERROR:.0%} (median) and {_WORST_ERROR:.0%} (worst), "
        f"of memory {_MEMORY_ERROR:.0%}."
    )
    errors: list[float] = []
    memory_errors: list[float] = []
    seconds = 0.0
    runs = HELD_OUT_RUNS if options.held_out else PUBLISHED_RUNS
    asked = [run for run in runs.values() if (options.workload or "") in run.name]
    pool = ThreadPoolExecutor(_AT_ONCE)
    for run, simulated in [(run, pool.submit(_simulated, run)) for run in asked]:
        found = simulated.result()
        if isinstance(found, str):
            report.notes.append(f"{run.name}: not simulated: {found}")
            continue
        rows = _rows(run, found)
        report.rows += rows
        errors.append(found["tokens_per_second_per_gpu"] / run.tokens_per_second_per_gpu - 1)
        memory = "not published"
        if run.memory_gib is not None:
            memory_errors.append(found["reserved_gib"] / run.memory_gib - 1)
            memory = f"{memory_errors[-1]:+.0%}"
        seconds += found["cpu_seconds"]
        report.notes.append(
            f"{run.name}: {errors[-1]:+.0%} throughput, memory {memory} "
            f"({found['peak_gib']:.1f} GiB live); "
            f"{found['exposed_share']:.0%} of the step exposed; {found['cpu_seconds']:.0f} CPU s, "
            f"{found['process_gib']:.1f} GiB{'' if found['fits'] else '; DOES NOT FIT'}"
        )
        if options.json is not None:  # a run that is ended early keeps what it has
            report.write(options.json)
    report.notes += _summary(errors, memory_errors, seconds, num_runs=len(runs))
    sys.stdout.write(report.table() + "\n")
    if options.json is not None:
        report.write(options.json)
    return 0


def _simulated(run: PublishedRun) -> dict[str, float] | str:
    """What a process of its own says of it, or why there is nothing."""
    try:
        return record_of("published.simulate", run.name)
    except RuntimeError as error:
        return str(error)


def _rows(run: PublishedRun, found: dict[str, float]) -> list[Row]:
    rows = [
        Row(
            workload=run.name,
            metric="published_error",
            unit="tokens/s/GPU",
            ours=Sample.of([found["tokens_per_second_per_gpu"]]),
            peer=Sample.of([run.tokens_per_second_per_gpu]),
            peer_name="published",
            simulated=True,
        )
    ]
    if run.memory_gib is not None:
        rows.append(
            Row(
                workload=run.name,
                metric="reserved_memory",
                unit="GiB",
                ours=Sample.of([found["reserved_gib"]]),
                peer=Sample.of([run.memory_gib]),
                peer_name="published",
                simulated=True,
            )
        )
    return rows


def _summary(
    errors: list[float], memory_errors: list[float], seconds: float, *, num_runs: int
) -> list[str]:
    if not errors:
        return []
    sizes = [abs(error) for error in errors]
    num_close = sum(abs(each) <= _MEMORY_ERROR for each in memory_errors)
    return [
        f"{len(errors)} of {num_runs} rows in {seconds:.0f} CPU s (goal {_SECONDS})",
        f"error of throughput: median {statistics.median(sizes):.0%}, worst {max(sizes):.0%}",
        f"memory: {num_close} of {len(memory_errors)} rows within {_MEMORY_ERROR:.0%}",
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--held-out", action="store_true", help="rows of other reports")
    parser.add_argument("--workload", help="only runs with this text in their names")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
