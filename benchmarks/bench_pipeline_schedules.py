"""How long does it take to study a pipeline schedule, and are its numbers the published ones?

For each schedule at 8 ranks and 32 microbatches: the CPU time to make and lower it, against
PyTorch's constructors, which do the same; that to simulate it, for which PyTorch has no
counterpart that takes a lowered schedule; and its simulated idle time and live chunks::

    python benchmarks/bench_pipeline_schedules.py [--json FILE] [--samples 7]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from report import Report, Row, Sample
from torch.distributed.pipelining.schedules import get_schedule_class

from gt_pipeline.schedules import (
    SCHEDULE_NAMES,
    ActionCosts,
    Schedule,
    ScheduleTimeline,
    lower,
    schedule_of,
    simulate,
)

_NUM_RANKS = 8
_NUM_MICROBATCHES = 32
_SIMULATION_GOAL_MS = 100.0
_COSTS = ActionCosts(overlap_f_b=3.0)
_PEER_NAME = "torch.distributed.pipelining"
_SINGLE_STAGE = ("GPipe", "1F1B")

# Idle units of a rank at F = dI = W = 1, B = 2, F&B = 3, and the most live chunks of any rank.
_PUBLISHED_IDLE = {
    "Interleaved1F1B": (_NUM_RANKS - 1) * 3.0,
    "DualPipeV": (_NUM_RANKS - 1) * 2.0,
}
_PUBLISHED_LIVE = {"Interleaved1F1B": 23.0, "ZBVZeroBubble": 16.0, "DualPipeV": 17.0}

_T = TypeVar("_T")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--samples", type=int, default=7, help="of each (default: 7)")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    gc.freeze()  # a full collection looks at everything that torch has, and says nothing of us
    report = Report(benchmark="pipeline_schedules")
    slowest = 0.0
    for name in SCHEDULE_NAMES:
        slowest = max(slowest, _measure(name, report, num_samples=options.samples))
    report.notes.append(
        f"slowest median of a simulation: {slowest:.0f} CPU ms, asked for at most "
        f"{_SIMULATION_GOAL_MS:.0f}: {'met' if slowest <= _SIMULATION_GOAL_MS else 'missed'}"
    )
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _measure(name: str, report: Report, *, num_samples: int) -> float:
    """Add the rows of one schedule; returns the median of simulating it, in CPU ms."""
    num_stages = _NUM_RANKS if name in _SINGLE_STAGE else 2 * _NUM_RANKS
    workload = f"{name}, {_NUM_RANKS} ranks, {num_stages} stages, {_NUM_MICROBATCHES} microbatches"
    made, peers, simulated = [], [], []
    for _ in range(num_samples):
        schedule, made_ms = _timed(lambda: _ours(name, num_stages))
        lowered, lowered_ms = _timed(lambda: lower(schedule, unshards=True, reduces=True))  # noqa: B023 # called at once
        timeline, simulated_ms = _timed(lambda: simulate(lowered, _COSTS))  # noqa: B023 # called at once
        made.append(made_ms + lowered_ms)
        simulated.append(simulated_ms)
        if name not in _SINGLE_STAGE:
            peers.append(_timed(lambda: _theirs(name, num_stages))[1])
    report.rows += [
        Row(
            workload=workload,
            metric="schedule_lowered",
            unit="CPU ms",
            ours=Sample.of(made),
            peer=Sample.of(peers) if peers else None,
            peer_name=_PEER_NAME if peers else None,
        ),
        Row(
            workload=workload,
            metric="schedule_simulated",
            unit="CPU ms",
            ours=Sample.of(simulated),
        ),
        *_simulated_rows(workload, name, timeline),
    ]
    return Sample.of(simulated).median


def _simulated_rows(workload: str, name: str, timeline: ScheduleTimeline) -> list[Row]:
    def row(metric: str, unit: str, ours: float, published: float | None) -> Row:
        return Row(
            workload=workload,
            metric=metric,
            unit=unit,
            ours=Sample.of([ours]),
            peer=None if published is None else Sample.of([published]),
            peer_name=None if published is None else "published",
            simulated=True,
        )

    return [
        row("idle", "units, any rank", max(timeline.idle), _PUBLISHED_IDLE.get(name)),
        row("idle within its span", "units, worst rank", max(timeline.idle_within_span), None),
        row("live chunks", "worst rank", max(timeline.peak_live), _PUBLISHED_LIVE.get(name)),
    ]


def _ours(name: str, num_stages: int) -> Schedule:
    return schedule_of(
        name, num_ranks=_NUM_RANKS, num_stages=num_stages, num_microbatches=_NUM_MICROBATCHES
    )


def _theirs(name: str, num_stages: int) -> object:
    """PyTorch's constructor, which reads nothing of stages but their sizes."""
    stages = [
        SimpleNamespace(num_stages=num_stages, group_size=_NUM_RANKS, group_rank=0, submod=None)
        for _ in range(num_stages // _NUM_RANKS)
    ]
    return get_schedule_class(name)(stages, n_microbatches=_NUM_MICROBATCHES)


def _timed(make: Callable[[], _T]) -> tuple[_T, float]:
    start = time.process_time()
    made = make()
    return made, (time.process_time() - start) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
