"""How much of the token exchange does EP overlap hide, and what does a step gain by it?

DeepSeek-V3 16B at EP 32 is captured on 32 ranks that do not exist, without chunks and with them, by
each producer and for each root, and simulated on H100s::

    python benchmarks/bench_ep_overlap.py [--json FILE] [--page FILE] [--only 'layers.*, graph']

The constants of the model were fixed before (docs/decisions/0007-cost-model.md); the publication is
of other software on real machines. Every row is simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt_trainer import device

device.install("cpu")

# torchtitan copies the device when it is imported, hence not above.
from chunk_overlap.exchange_bounds import exchange_bounds  # noqa: E402
from chunk_overlap.overlap_page import write_overlap_page  # noqa: E402
from chunk_overlap.overlap_picture import (  # noqa: E402
    LayerTimeline,
    common_scale,
    layer_timeline,
)
from peer_overlap_schedule import PEER_NAME, PEER_SCHEDULE  # noqa: E402
from report import Report, Row, Sample  # noqa: E402
from torch.fx import GraphModule  # noqa: E402

from gt_config import ConfigError, EpOverlapConfig  # noqa: E402
from gt_passes.ep_overlap import exposed_exchanges, interrupted_exchanges  # noqa: E402
from gt_trainer.dry_run.dry_run import dry_run  # noqa: E402
from gt_trainer.dry_run.simulated_step import SimulatedStep  # noqa: E402
from gt_trainer.preflight.preflight import check_configuration  # noqa: E402

_MODULE, _CONFIG, _WORLD_SIZE = "deepseek_v3", "deepseek_v3_16b", 32
_PUBLISHED_GAIN = 1.27
_SOURCE = "pytorch/torchtitan #3434: DeepSeek-V3 16B on 32 H100s, with EP overlap and without"
_MOST_EXPOSED = 0.1
"""Of the exchange of ``layers.*``: what must hold."""

_BASE = {
    "memory_policy": "save_all",
    "fsdp_bucketing": "transformer_block",
    "prefetch_layers": 1,
}
_PICTURED_LAYER = "layers.5"
_PICTURE_COLUMNS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to chunk the model."""

    module_fqn: Any
    strategy: Any
    in_order_of_peer: bool = False

    @property
    def name(self) -> str:
        chunks = f"{self.module_fqn}, {self.strategy}"
        return f"{chunks}, {PEER_NAME}" if self.in_order_of_peer else chunks


VARIANTS = tuple(
    Variant(module_fqn=module_fqn, strategy=strategy, in_order_of_peer=in_order_of_peer)
    for module_fqn in ("layers.*", "layers.*.moe")
    for strategy in ("graph", "eager")
    for in_order_of_peer in (False, True)
)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    report = Report(benchmark="ep_overlap")
    report.notes.append(
        f"{_CONFIG} on {_WORLD_SIZE} H100 SXM, EP {_WORLD_SIZE}, balanced routing, local batch "
        "4 x 4,096 tokens in 2 chunks of the batch, every activation kept, parameters gathered by "
        "block one ahead. All rows are simulated. bound: the smaller of the exchange and of what "
        "the other chunks compute; layers before and after a region hide exchange beyond it."
    )
    report.notes.append(f"published gain: {_SOURCE}")
    without = _simulate(None, options.layers)
    pictured = _PICTURED_LAYER
    if options.layers is not None:
        pictured = f"layers.{min(options.layers - 1, int(_PICTURED_LAYER.split('.')[1]))}"
    pictures = {"without chunks": layer_timeline(without.graph, pictured, "forward")}
    report.rows += _rows_without(without)
    report.notes.append(f"without chunks: {without.sensitivity}")
    for variant in VARIANTS:
        if options.only and options.only not in variant.name:
            continue
        begin = time.process_time()
        try:
            run = _simulate(variant, options.layers)
        except ValueError as refusal:
            # A peer may refuse chunks that are not its own; whatever else fails, fails here too.
            if not (variant.in_order_of_peer or isinstance(refusal, ConfigError)):
                raise
            report.notes.append(f"{variant.name}: not simulated: {refusal}")
            continue
        report.rows += _rows(variant, run, without)
        report.notes += _notes(variant, run, without, time.process_time() - begin)
        pictures[variant.name] = layer_timeline(run.graph, pictured, "forward")
    _show(report, pictures)
    if options.json is not None:
        report.write(options.json)
    if options.page is not None:
        write_overlap_page(pictures, options.page)
    return 0


def _simulate(variant: Variant | None, num_layers: int | None) -> SimulatedStep:
    config = getattr(importlib.import_module(f"gt_trainer.models.{_MODULE}"), _CONFIG)()
    options: dict[str, Any] = dict(_BASE)
    if variant is not None:
        options["ep_overlap"] = EpOverlapConfig(
            enabled=True,
            strategy=variant.strategy,
            module_fqn=variant.module_fqn,
            chunk_dim="batch",
        )
        if variant.in_order_of_peer:
            options |= {"disable_passes": ("schedule-ep-overlap",), "passes": (PEER_SCHEDULE,)}
    config.compile = dataclasses.replace(config.compile, **options)
    if num_layers is not None:
        config.model_spec.model.layers = config.model_spec.model.layers[:num_layers]
    check_configuration(config, _WORLD_SIZE, will_train=False)
    return dry_run(config, _WORLD_SIZE).simulated


def _rows_without(run: SimulatedStep) -> Iterator[Row]:
    exchange_us, exposed_us = _exchange(run)
    name = "without chunks"
    yield _row(name, "step_time", "ms", run.step_us / 1e3)
    yield _row(name, "exchange_us", "us", exchange_us)
    yield _row(name, "exposed_us", "us", exposed_us)
    yield _row(name, "peak_gib", "GiB", run.peak_bytes / 2**30)


def _rows(variant: Variant, run: SimulatedStep, without: SimulatedStep) -> Iterator[Row]:
    exchange_us, exposed_us = _exchange(run)
    bounds = exchange_bounds(_graph_of(run), run.graph)
    least_us = sum(bound.least_exposed_us for bound in bounds)
    name = variant.name
    yield _row(name, "step_time", "ms", run.step_us / 1e3, peer=without.step_us / 1e3)
    yield _row(name, "exchange_us", "us", exchange_us, peer=_exchange(without)[0])
    goal = _MOST_EXPOSED if variant.module_fqn == "layers.*" else None
    yield _row(
        name, "exposed_us", "us", exposed_us, peer=exchange_us, peer_name="exchange_us", goal=goal
    )
    yield _row(name, "exposed_us at the bound", "us", least_us)
    yield _row(name, "peak_gib", "GiB", run.peak_bytes / 2**30, peer=without.peak_bytes / 2**30)
    yield _row(name, "gain", "x", _gain(run, without), peer=_PUBLISHED_GAIN, peer_name="published")


def _row(
    workload: str,
    metric: str,
    unit: str,
    ours: float,
    *,
    peer: float | None = None,
    peer_name: str = "without chunks",
    goal: float | None = None,
) -> Row:
    return Row(
        workload=workload,
        metric=metric,
        unit=unit,
        ours=Sample.of([ours]),
        peer=None if peer is None else Sample.of([peer]),
        peer_name=None if peer is None else peer_name,
        goal=goal,
        simulated=True,
    )


def _notes(
    variant: Variant, run: SimulatedStep, without: SimulatedStep, cpu_seconds: float
) -> Iterator[str]:
    graph_module = _graph_of(run)
    exposed, interrupted = exposed_exchanges(graph_module), interrupted_exchanges(graph_module)
    yield (
        f"{variant.name}: exchanges behind which no other chunk computes: {len(exposed)}; FSDP "
        f"collectives launched inside of an exchange: {len(interrupted)}; {cpu_seconds:.0f} CPU s"
    )
    yield f"{variant.name}: {run.sensitivity}"
    ranges = ", ".join(
        f"{ours.group} {before.faster_us / ours.faster_us:.2f}-"
        f"{before.slower_us / ours.slower_us:.2f}"
        for ours, before in zip(run.sensitivity.ranges, without.sensitivity.ranges, strict=True)
    )
    yield (
        f"{variant.name}: gain {_gain(run, without):.2f}x simulated ({_PUBLISHED_GAIN}x "
        f"published); with +30% to -30% of {ranges}"
    )


def _gain(run: SimulatedStep, without: SimulatedStep) -> float:
    return without.step_us / run.step_us


def _exchange(run: SimulatedStep) -> tuple[float, float]:
    """Duration and exposed time of all token exchanges."""
    totals = [total for total in run.graph.by_purpose if total.purpose == "EP token exchange"]
    return sum(t.duration_us for t in totals), sum(t.exposed_us for t in totals)


def _graph_of(run: SimulatedStep) -> GraphModule:
    graph_module = run.graph.run.nodes[0].graph.owning_module
    assert isinstance(graph_module, GraphModule)  # dry_run simulates one
    return graph_module


def _show(report: Report, pictures: dict[str, LayerTimeline]) -> None:
    sys.stdout.write(report.table() + "\n\n")
    scale = common_scale(list(pictures.values()), _PICTURE_COLUMNS)
    for name, picture in pictures.items():
        drawing = picture.text(columns=_PICTURE_COLUMNS, us_per_column=scale)
        sys.stdout.write(f"{name}\n{drawing}\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--page", type=Path, help="also draw a layer on this HTML page")
    parser.add_argument("--only", help="only variants whose name contains this")
    parser.add_argument("--layers", type=int, help="only so many layers, for a quick look")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
