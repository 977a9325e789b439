"""How far are simulated pipelines from what others measured, and from a second simulation?

Each workload is a published measurement on H100s. Its stages are captured for ranks that do not
exist, and its schedule is simulated on the published machine; and once more, moment by moment, by
code that shares nothing with ours (``pipeline_simulation/step_by_step.py``)::

    python benchmarks/bench_pipeline_simulation.py [--json FILE] [--workload interleaved]

Source: torchtitan's report of December 2024 (``benchmarks/llama3_h100_202412_torchtitan.md`` of
pytorch/torchtitan, tables 5 and 6; the runs of arXiv 2410.06511). Those runs multiply in float8,
with asynchronous tensor parallelism. Ours are predicted in bfloat16 without it: a row says so, and
its ratio is no error of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gt_trainer import device

device.install("cpu")

# torchtitan copies the device when it is imported, hence not above.
from pipeline_simulation.step_by_step import StepByStep, simulate_step_by_step  # noqa: E402
from report import Report, Row, Sample  # noqa: E402

from gt_passes.simulation import h100_hbm2e_500w  # noqa: E402
from gt_trainer.dry_run.dry_run import captured_report  # noqa: E402
from gt_trainer.dry_run.dry_run_report import DryRunReport  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402
from gt_trainer.preflight.settled_defaults import settle_defaults  # noqa: E402
from gt_trainer.quantization.quantization_options import QuantizationConfig  # noqa: E402

_WORLD_SIZE = 512
_IDLE_BAND = 0.05
"""How far apart the idle times of two simulations of one schedule may be."""

_LABEL = "predicted in bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One measurement, of Llama 3.1 405B on 512 GPUs: FSDP 8 x TP 8 x PP 8."""

    name: str
    schedule: str
    batch_size: int
    """Sequences of one data-parallel rank."""

    microbatch_size: int
    seq_len: int
    tokens_per_second_per_gpu: float
    peak_gib: float


_MICROBATCHES = (
    "The report names no microbatches: as many as pipeline ranks, torchtitan's default then "
    "(n_microbatches=parallel_dims.pp in its pipelining_utils.py)."
)

PUBLISHED = (
    Published(
        name="1F1B",
        schedule="1F1B",
        batch_size=32,
        microbatch_size=4,
        seq_len=8192,
        tokens_per_second_per_gpu=100,
        peak_gib=82.5,
    ),
    Published(
        name="interleaved 1F1B",
        schedule="Interleaved1F1B",
        batch_size=32,
        microbatch_size=4,
        seq_len=8192,
        tokens_per_second_per_gpu=128,
        peak_gib=72.7,
    ),
    Published(
        name="1F1B, 32k",
        schedule="1F1B",
        batch_size=8,
        microbatch_size=1,
        seq_len=32768,
        tokens_per_second_per_gpu=76,
        peak_gib=75.3,
    ),
)
"""Tables 5 and 6, but for the rows that have context parallelism."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    report = Report(benchmark="pipeline_simulation")
    report.notes.append(
        f"All rows are simulated on {h100_hbm2e_500w().name}, {_LABEL}; the published runs "
        f"multiply in float8, with asynchronous tensor parallelism. {_MICROBATCHES}"
    )
    for published in PUBLISHED:
        if options.workload is None or options.workload in published.name:
            _compare(published, report)
    sys.stdout.write(report.table() + "\n")
    if options.json is not None:
        report.write(options.json)
    return 0


def _compare(published: Published, report: Report) -> None:
    begin, cpu = time.perf_counter(), time.process_time()
    found = _predicted(published)
    seconds = time.perf_counter() - begin
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    name = f"405B, {published.name}, {_LABEL}"
    report.notes.append(
        f"{name}: {found.simulated.sensitivity}; dry run {seconds:.0f} s, "
        f"{time.process_time() - cpu:.0f} CPU s, process peak {peak_gib:.2f} GiB"
    )
    report.rows += _published_rows(name, published, found)
    report.rows += _idle_rows(name, found)


def _predicted(published: Published) -> DryRunReport:
    with device.intended_for("cuda"):
        config = importlib.import_module("gt_trainer.models.llama3").llama3_405b_pp()
        config.training = dataclasses.replace(
            config.training, local_batch_size=published.batch_size, seq_len=published.seq_len
        )
        config.quantization = QuantizationConfig()  # in bfloat16
        config.parallelism.pipeline_parallel_schedule = published.schedule
        config.parallelism.pipeline_parallel_microbatch_size = published.microbatch_size
        config, _ = settle_defaults(config, _WORLD_SIZE)
        check_configuration(config, _WORLD_SIZE, will_train=False)
        return captured_report(config, _WORLD_SIZE, hardware=h100_hbm2e_500w())


def _published_rows(name: str, published: Published, found: DryRunReport) -> list[Row]:
    simulated = found.simulated
    assert simulated.schedule is not None
    between = simulated.schedule.time

    def row(metric: str, unit: str, ours: float, peer: float | None = None) -> Row:
        return Row(
            workload=name,
            metric=metric,
            unit=unit,
            ours=Sample.of([ours]),
            peer=None if peer is None else Sample.of([peer]),
            peer_name=None if peer is None else "published, float8",
            simulated=True,
        )

    speed = simulated.tokens_per_second_per_gpu
    per_gpu = simulated.facts.tokens / simulated.facts.num_gpus
    return [
        row("tokens_per_second_per_gpu", "1/s", speed, published.tokens_per_second_per_gpu),
        row(
            "step_time",
            "ms",
            simulated.step_us / 1e3,
            1e3 * per_gpu / published.tokens_per_second_per_gpu,
        ),
        row("peak_gib", "GiB", simulated.peak_bytes / 2**30, published.peak_gib),
        row("published_error", "1", speed / published.tokens_per_second_per_gpu - 1),
        row("bubble", "fraction of the step", simulated.bubble),
        *(
            row(f"exposed_us {purpose}", "us", exposed)
            for purpose, exposed in simulated.exposed_us.items()
        ),
        row("exposed_us gathers and reductions", "us", between.gathers),
        row("exposed_us transfers", "us", between.transfers),
    ]


def _idle_rows(name: str, found: DryRunReport) -> list[Row]:
    """The worst rank's idle time, and the farthest that the two simulations are apart."""
    assert found.simulated.schedule is not None
    ours = found.simulated.schedule.time.timeline
    theirs = again(found)
    apart = max(abs(a - b) / b for a, b in zip(ours.idle, theirs.idle, strict=True))
    assert apart <= _IDLE_BAND, f"idle times differ by {apart:.1%}"
    return [
        Row(
            workload=name,
            metric="idle",
            unit="us, worst rank",
            ours=Sample.of([max(ours.idle)]),
            peer=Sample.of([max(theirs.idle)]),
            peer_name="step by step",
            simulated=True,
        ),
        Row(
            workload=name,
            metric="idle_apart",
            unit="fraction, worst rank",
            ours=Sample.of([apart]),
            simulated=True,
        ),
    ]


def again(found: DryRunReport) -> StepByStep:
    """The schedule of a dry run, simulated by other code at the same prices."""
    schedule = found.simulated.schedule
    assert schedule is not None
    prices = {span.action: span.duration for span in schedule.time.timeline.spans}
    return simulate_step_by_step(schedule.lowered, prices.__getitem__, overlap_gathers=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--workload", help="only rows whose name contains this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
