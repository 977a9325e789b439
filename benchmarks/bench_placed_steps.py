"""Is a step that a solver placed faster than the one that experts place by hand, or smaller?

Each shipped configuration, at the size it is meant for, is planned, captured, put through its
recipe and simulated, as ``gt-train --dry-run --compile.autoparallel`` does and prints it; and so
are the steps that an expert would run instead (``placed_steps.experts``)::

    python benchmarks/bench_placed_steps.py [--json FILE] [--workload llama3_8b] [--budget-gib 40]

Every row is simulated. The peer is the fastest step by hand that fits: a ratio below 1 says that
the plan is better. All steps by hand are notes, and so is what cannot be planned. Pipelines are
left out: their dry run has rows of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gt_trainer import device

device.install("cpu")

# torchtitan copies the device when it is imported, hence not above.
from placed_steps.experts import (  # noqa: E402
    ExpertRun,
    config_by_hand,
    expert_runs,
    name_of,
)
from report import Report, Row, Sample  # noqa: E402

from gt_autoparallel import PlacementError  # noqa: E402
from gt_config import AutoParallelConfig, ConfigError  # noqa: E402
from gt_trainer.dry_run.dry_run import dry_run  # noqa: E402
from gt_trainer.dry_run.dry_run_report import DryRunReport  # noqa: E402
from gt_trainer.dry_run.simulated_step import SimulatedStep  # noqa: E402
from gt_trainer.models.catalog import CATALOG, CatalogEntry  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402
from gt_trainer.preflight.settled_defaults import settle_defaults  # noqa: E402
from gt_trainer.trainer import GraphTrainer  # noqa: E402

_SLOWEST = 1.01
"""By how much a plan may be slower than the best expert's step."""


def workloads() -> Iterator[CatalogEntry]:
    """The published sizes that are no pipelines."""
    for table in CATALOG.values():
        for entry in table.values():
            if not entry.config.endswith("_pp") and "debugmodel" not in entry.config:
                yield entry


def main(arguments: list[str] | None = None) -> int:
    """Run the workloads, print the table, write the file."""
    options = _parse(arguments)
    report = Report(benchmark="placed_steps")
    if options.add:
        try:
            report.continue_from(options.json)
        except ValueError as error:
            raise SystemExit(f"--add: {error}") from None
    else:
        report.notes.append("All rows are simulated on H100 SXM; a ratio below 1 favors the plan.")
    for entry in workloads():
        if options.workload in entry.config:
            with device.intended_for("cuda"):
                for _ in _compare(entry, report, options):
                    _write(report, options.json)
    sys.stdout.write(report.table() + "\n")
    _write(report, options.json)
    return 0


def _write(report: Report, path: Path | None) -> None:
    if path is not None:
        report.write(path)


def _compare(entry: CatalogEntry, report: Report, asked: argparse.Namespace) -> Iterator[None]:
    """Add to the report what is simulated of a workload; yields after each step."""
    module = importlib.import_module(f"gt_trainer.models.{entry.module}")
    config = getattr(module, entry.config)()
    solver = dataclasses.replace(
        config.compile.autoparallel_solver,
        memory_budget_gib=asked.budget_gib,
        time_limit_seconds=asked.time_limit_seconds,
        plan=asked.plan,
    )
    config.compile = dataclasses.replace(
        config.compile, autoparallel=True, autoparallel_solver=solver
    )
    begin = time.process_time()
    try:
        planned = _planned(config, entry.world_size)
    except (ConfigError, PlacementError) as refusal:
        report.notes.append(f"{entry.config}: not planned: {refusal}")
        return
    seconds = time.process_time() - begin
    degrees = " x ".join(f"{name} {degree}" for name, degree in planned.degrees)
    read = "" if asked.plan is None else "; its plan was found before"
    budget = "" if asked.budget_gib is None else f" in {asked.budget_gib:g} GiB"
    ours = ExpertRun(name=f"planned on {degrees}{budget}", run=planned.simulated)
    report.notes.append(f"{entry.config}: {ours}; the dry run took {seconds:.0f} CPU s{read}")
    if planned.judgement is not None:
        report.notes += [f"{entry.config}: plan {line}" for line in planned.judgement.lines()]
    sys.stdout.write(f"{planned}\n")
    yield
    assert planned.beside_by_hand is not None
    by_hand = planned.beside_by_hand.by_hand
    name = name_of(planned.degrees, config.compile.memory_policy)
    shipped = ExpertRun(name=name, run=by_hand)
    experts = []
    for expert in expert_runs(config, entry.world_size, shipped):
        experts.append(expert)
        report.notes.append(f"{entry.config}: by hand, {expert}")
        yield
    fitting = [each for each in experts if each.run.fits]
    if fitting:
        best = min(fitting, key=lambda each: each.run.step_us)
        report.rows += _rows(entry, planned.simulated, best)


def _planned(config: GraphTrainer.Config, world_size: int) -> DryRunReport:
    by_hand = config_by_hand(config, config.compile.memory_policy, world_size)
    config, _ = settle_defaults(config, world_size)
    check_configuration(config, world_size, will_train=False)
    return dry_run(config, world_size, by_hand=by_hand)


def _rows(entry: CatalogEntry, planned: SimulatedStep, best: ExpertRun) -> Iterator[Row]:
    def of(run: SimulatedStep) -> dict[tuple[str, str], float]:
        return {
            ("step_time", "ms"): run.step_us / 1e3,
            ("exposed_us", "us"): run.all_exposed_us,
            ("peak_gib", "GiB"): run.peak_bytes / 2**30,
        }

    by_hand = of(best.run)
    for (metric, unit), value in of(planned).items():
        yield Row(
            workload=entry.config,
            metric=metric,
            unit=unit,
            ours=Sample.of([value]),
            peer=Sample.of([by_hand[metric, unit]]),
            peer_name=best.name,
            goal=_SLOWEST if metric == "step_time" else None,
            simulated=True,
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--add",
        action="store_true",
        help="to what the file has already, of today: large sizes take a run of their own each",
    )
    parser.add_argument(
        "--workload", default="", help="only configurations whose name contains this"
    )
    parser.add_argument(
        "--budget-gib", type=float, help="what a plan may take of a rank; by default of an H100"
    )
    parser.add_argument(
        "--time-limit-seconds",
        type=float,
        default=AutoParallelConfig().time_limit_seconds,
        help="of each search, by the clock: more on a machine that does other things",
    )
    parser.add_argument(
        "--plan",
        help="placement.json of a dry run of the one workload: nothing is searched for again",
    )
    options = parser.parse_args(arguments)
    if options.add and options.json is None:
        parser.error("--add needs --json FILE")
    return options


if __name__ == "__main__":
    sys.exit(main())
