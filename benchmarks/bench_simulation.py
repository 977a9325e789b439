"""How far is the simulated step from what others measured and published?

Each workload is a published measurement of torchtitan's graph_trainer on H100s. Its configuration
is captured on as many ranks as it ran on, none of which exist, and simulated, with that system's
times of the host (``published/graph_trainer_host.json``)::

    python benchmarks/bench_simulation.py [--json FILE] [--workload llama3]

The constants of the model come each from its own source, none of them a row of this table
(docs/decisions/0007-cost-model.md), so this says how good the model is, and not how well it was
fitted. Every row is simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt_trainer import device

device.install("cpu")

# torchtitan copies the device when it is imported, hence not above.
from report import Report, Row, Sample  # noqa: E402

from gt_config import ConfigError  # noqa: E402
from gt_passes.simulation.hardware import load_hardware  # noqa: E402
from gt_trainer.dry_run.dry_run import dry_run  # noqa: E402
from gt_trainer.dry_run.simulated_step import SimulatedStep  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402

_MEASURED_ON = Path(__file__).parent / "published" / "graph_trainer_host.json"
_BAND = 0.15
"""How far off a simulated step may be before we call the model wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One measurement that somebody published."""

    name: str
    """What ran, as a suffix of the workload."""

    tokens_per_second_per_gpu: float
    source: str
    compile: dict[str, Any]
    """Our options that come closest to what ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A configuration, and what it was measured at."""

    module: str
    config: str
    world_size: int
    assumptions: str
    published: tuple[Published, ...]


_LAUNCHED = {"inductor_compilation": "none", "cuda_graphs": False}
"""One operator after another, as Python calls them."""

_RECORDED = {"inductor_compilation": "none", "cuda_graphs": True}

_PLAIN = {"memory_policy": "save_all", "fsdp_bucketing": "off", "prefetch_layers": 0}
"""The graph as captured, but for cleaning up."""

_AS_PUBLISHED = {
    "memory_policy": "selective",
    "fsdp_bucketing": "transformer_block",
    "prefetch_layers": 1,
}
"""Both publications gather a transformer block at once, one ahead of its use, and compute
element-wise operators again."""

_EP = "pytorch/torchtitan #3434, without EP overlap"
_DENSE = "pytorch/torchtitan #3141"

WORKLOADS = (
    Workload(
        module="deepseek_v3",
        config="deepseek_v3_16b",
        world_size=32,
        assumptions="FSDP 32, EP 32, 4 nodes, balanced routing; local batch 4 x 4,096 tokens as "
        "torchtitan ships the configuration (the publication names neither; MFU fits 4,096)",
        published=(
            Published(
                name="as captured",
                tokens_per_second_per_gpu=8086,
                source=_EP,
                compile=_PLAIN | _LAUNCHED,
            ),
            Published(
                name="bucketed, selective recomputation",
                tokens_per_second_per_gpu=8086,
                source=_EP,
                compile=_AS_PUBLISHED | _LAUNCHED,
            ),
        ),
    ),
    Workload(
        module="llama3",
        config="llama3_8b",
        world_size=8,
        assumptions="FSDP 4 x TP 2, 1 node; local batch 1 x 8,192 tokens as torchtitan ships the "
        "configuration (the publication names neither)",
        published=(
            Published(
                name="as captured, no CUDA graphs",
                tokens_per_second_per_gpu=5270,
                source=f"{_DENSE}: 6,876 without the 30.5 % that CUDA graphs gave",
                compile=_PLAIN | _LAUNCHED,
            ),
            Published(
                name="as captured, CUDA graphs",
                tokens_per_second_per_gpu=6876,
                source=f"{_DENSE}, regional Inductor",
                compile=_PLAIN | _RECORDED,
            ),
            Published(
                name="bucketed, selective recomputation, CUDA graphs",
                tokens_per_second_per_gpu=6876,
                source=f"{_DENSE}, regional Inductor",
                compile=_AS_PUBLISHED | _RECORDED,
            ),
            Published(
                name="one Inductor region, CUDA graphs",
                tokens_per_second_per_gpu=7522,
                source=f"{_DENSE}, full Inductor",
                compile=_AS_PUBLISHED | {"inductor_compilation": "full", "cuda_graphs": True},
            ),
        ),
    ),
)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    report = Report(benchmark="simulation")
    report.notes.append(
        "All rows are simulated on H100 SXM from constants of other sources, fixed on "
        f"2026-11-23. Aim: a ratio from {1 - _BAND:.2f} to {1 + _BAND:.2f}."
    )
    for workload in WORKLOADS:
        if options.workload and options.workload not in workload.config:
            continue
        report.notes.append(f"{workload.config}: {workload.assumptions}")
        for published in workload.published:
            _compare(workload, published, report)
    sys.stdout.write(report.table() + "\n")
    if options.json is not None:
        report.write(options.json)
    return 0


def _compare(workload: Workload, published: Published, report: Report) -> None:
    with device.intended_for("cuda"):
        _compare_on_gpu(workload, published, report)


def _compare_on_gpu(workload: Workload, published: Published, report: Report) -> None:
    config = getattr(
        importlib.import_module(f"gt_trainer.models.{workload.module}"), workload.config
    )()
    config.compile = dataclasses.replace(config.compile, **published.compile)
    name = f"{workload.config}, {published.name}"
    try:
        check_configuration(config, workload.world_size, will_train=False)
    except ConfigError as refusal:
        report.notes.append(f"{name}: not simulated: {refusal}")
        return
    begin = time.process_time()
    hardware = load_hardware(_MEASURED_ON.read_text())
    simulated = dry_run(config, workload.world_size, hardware=hardware).simulated
    report.notes.append(f"{name}: {simulated.sensitivity}; {_origin(published, begin)}")
    report.rows += _rows(name, published, simulated)


def _rows(name: str, published: Published, simulated: SimulatedStep) -> list[Row]:
    facts = simulated.facts
    published_ms = 1e3 * facts.tokens / published.tokens_per_second_per_gpu / facts.num_gpus
    rows = [
        Row(
            workload=name,
            metric="step_time",
            unit="ms",
            ours=Sample.of([simulated.step_us / 1e3]),
            peer=Sample.of([published_ms]),
            peer_name="published",
            simulated=True,
        ),
        Row(
            workload=name,
            metric="tokens_per_second_per_gpu",
            unit="1/s",
            ours=Sample.of([simulated.tokens_per_second_per_gpu]),
            peer=Sample.of([published.tokens_per_second_per_gpu]),
            peer_name="published",
            simulated=True,
        ),
        Row(
            workload=name,
            metric="peak_gib",
            unit="GiB",
            ours=Sample.of([simulated.peak_bytes / 2**30]),
            simulated=True,
        ),
    ]
    rows += [
        Row(
            workload=name,
            metric=f"exposed_us {total.purpose}",
            unit="us",
            ours=Sample.of([total.exposed_us]),
            simulated=True,
        )
        for total in simulated.graph.by_purpose
    ]
    return rows


def _origin(published: Published, begin: float) -> str:
    return f"{published.source}; capture to report {time.process_time() - begin:.0f} CPU s"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--workload", help="only configurations whose name contains this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
