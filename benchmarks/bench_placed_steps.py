"""Is a step that a solver placed faster than the one that experts place by hand, or smaller?

Each shipped configuration, at the size it is meant for, is planned, captured, put through its
recipe and simulated; and so it is as torchtitan places it at the same degrees::

    python benchmarks/bench_placed_steps.py [--json FILE] [--workload llama3_8b]

Every row is simulated, and the peer is the placement by hand: a ratio below 1 says that the plan is
better. What cannot be planned is a note. Pipelines are left out: a solver places none of them yet.
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
from report import Report, Row, Sample  # noqa: E402

from gt_autoparallel import PlacementError  # noqa: E402
from gt_config import ConfigError  # noqa: E402
from gt_trainer.dry_run.beside_by_hand import PlacedByHand  # noqa: E402
from gt_trainer.dry_run.dry_run import DryRunReport, dry_run  # noqa: E402
from gt_trainer.dry_run.simulated_run import SimulatedRun  # noqa: E402
from gt_trainer.models.catalog import CATALOG, CatalogEntry  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402
from gt_trainer.preflight.settled_defaults import settle_defaults, settled_by_hand  # noqa: E402

_PEER = "placed by hand"


def workloads() -> Iterator[CatalogEntry]:
    """The published sizes that are no pipelines."""
    for table in CATALOG.values():
        for entry in table.values():
            if not entry.config.endswith(("_pp", "_debugmodel")):
                yield entry


def main(arguments: list[str] | None = None) -> int:
    """Run the workloads, print the table, write the file."""
    options = _parse(arguments)
    report = Report(benchmark="placed_steps")
    report.notes.append("All rows are simulated on H100 SXM; a ratio below 1 favors the plan.")
    for entry in workloads():
        if options.workload in entry.config:
            with device.intended_for("cuda"):
                _compare(entry, report)
    sys.stdout.write(report.table() + "\n")
    if options.json is not None:
        report.write(options.json)
    return 0


def _compare(entry: CatalogEntry, report: Report) -> None:
    module = importlib.import_module(f"gt_trainer.models.{entry.module}")
    config = getattr(module, entry.config)()
    config.compile = dataclasses.replace(config.compile, autoparallel=True)
    begin = time.process_time()
    try:
        by_hand = settled_by_hand(config, entry.world_size)
        config, _ = settle_defaults(config, entry.world_size)
        check_configuration(config, entry.world_size, will_train=False)
        found = dry_run(config, entry.world_size, by_hand=by_hand)
    except (ConfigError, PlacementError) as refusal:
        report.notes.append(f"{entry.config}: not planned: {refusal}")
        return
    assert isinstance(found, DryRunReport)
    assert found.beside_by_hand is not None, "a shipped configuration may be placed by hand"
    report.rows += _rows(entry, found.beside_by_hand)
    degrees = " x ".join(f"{name} {degree}" for name, degree in found.degrees)
    report.notes.append(
        f"{entry.config}: {entry.world_size} ranks, {degrees}; "
        f"{time.process_time() - begin:.0f} CPU s for both"
    )


def _rows(entry: CatalogEntry, beside: PlacedByHand) -> Iterator[Row]:
    def of(run: SimulatedRun) -> dict[tuple[str, str], float]:
        return {
            ("step_time", "ms"): run.step_us / 1e3,
            ("exposed_us", "us"): run.exposed_us,
            ("peak_gib", "GiB"): run.peak_bytes / 2**30,
        }

    by_hand = of(beside.by_hand)
    for (metric, unit), value in of(beside.planned).items():
        yield Row(
            workload=entry.config,
            metric=metric,
            unit=unit,
            ours=Sample.of([value]),
            peer=Sample.of([by_hand[metric, unit]]),
            peer_name=_PEER,
            simulated=True,
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--workload", default="", help="only configurations whose name contains this"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
