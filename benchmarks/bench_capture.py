"""How much processor time does a capture take, how does it grow with layers, and what memory?

Ours, tracing every layer and stamping most of them, against the tracer of torchtitan's
graph_trainer, in turn, each capture in a process of its own::

    python benchmarks/bench_capture.py [--json FILE] [--samples 3] [--deep-samples 1]
        [--depths 5 8 16 32 64 126]

Llama 3 8B with 32 layers on 64 ranks and 405B with 126 on 1,024 ranks, none of which exists; then
8B at each depth. Building and placing the model, and imports before the capture, are not counted.
Before it is measured, each model is captured both ways once, and compared node by node.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from own_process import record_of
from report import Report, Row, Sample

_PEER_NAME = "torchtitan graph_trainer"
_CONTESTANTS = ("stamped", "full", "peer")
_GOALS = {"8B": (32, 0.2), "405B": (126, 0.12)}
_PEAK_GOAL_GIB = 1.0
_BAR_WIDTH = 50


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--samples", type=int, default=3, help="of 8B (default: 3)")
    parser.add_argument("--deep-samples", type=int, default=1, help="of 405B (default: 1)")
    parser.add_argument("--depths", type=int, nargs="*", default=[5, 8, 16, 32, 64, 126])
    parser.add_argument("--workloads", nargs="*", choices=list(_GOALS), default=list(_GOALS))
    options = parser.parse_args(arguments)
    if min(options.samples, options.deep_samples) < 1 or any(depth < 5 for depth in options.depths):
        parser.error("--samples and --deep-samples must be at least 1, and --depths at least 5")
    report = Report(benchmark="capture")
    for workload in options.workloads:
        num_samples = options.samples if workload == "8B" else options.deep_samples
        _compare(workload, report, num_samples=num_samples)
    if options.depths:
        _by_depth(options.depths, report)
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _compare(workload: str, report: Report, *, num_samples: int) -> None:
    """Add the rows of one model: every contestant in turn, as often as asked for."""
    num_layers, goal = _GOALS[workload]
    _capture("compared", workload, num_layers)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in _CONTESTANTS}
    for _ in range(num_samples):
        for name in _CONTESTANTS:
            found[name].append(_capture(name, workload, num_layers))
    title = f"llama3 {workload}, {num_layers} layers"
    peer = Sample.of([each["cpu_seconds"] for each in found["peer"]])
    for name, metric in (("stamped", "capture_cpu"), ("full", "capture_cpu, all layers traced")):
        report.rows.append(
            Row(
                workload=title,
                metric=metric,
                unit="CPU s",
                ours=Sample.of([each["cpu_seconds"] for each in found[name]]),
                peer=peer,
                peer_name=_PEER_NAME,
                goal=goal if name == "stamped" else None,
            )
        )
    for part in ("gate", "trace", "stamp"):
        report.rows.append(
            Row(
                workload=title,
                metric=f"capture_cpu, {part}",
                unit="CPU s",
                ours=Sample.of([each["parts"][part] for each in found["stamped"]]),
            )
        )
    for name in ("stamped", "full"):
        report.rows.append(
            Row(
                workload=title,
                metric=f"code generation afterwards, {name}",
                unit="CPU s",
                ours=Sample.of([each["code"]["seconds"] for each in found[name]]),
            )
        )
    peaks = [each["peak_gib"] for each in found["stamped"]]
    report.rows.append(
        Row(
            workload=title,
            metric="peak memory above the interpreter with torch",
            unit="GiB",
            ours=Sample.of(peaks),
            peer=Sample.of([each["peak_gib"] for each in found["peer"]]),
            peer_name=_PEER_NAME,
        )
    )
    met = "met" if max(peaks) <= _PEAK_GOAL_GIB else "missed"
    with_code = max(each["code"]["peak_gib"] for each in found["stamped"])
    report.notes.append(
        f"{title}: peak {max(peaks):.2f} GiB, goal {_PEAK_GOAL_GIB:g}: {met}; {with_code:.2f} GiB "
        "once the code of the graph is generated, which a stamped capture leaves to its first run"
    )
    report.notes.append(
        f"{title}: the stamped capture is the full one in all {found['full'][0]['nodes']:,} nodes, "
        "their metadata, inputs and outputs (--compile.capture_layers compared)"
    )


def _by_depth(depths: list[int], report: Report) -> None:
    """Seconds by depth, as rows and as a drawing; one sample of each."""
    seconds: dict[tuple[str, int], float] = {}
    for depth in depths:
        for name in ("stamped", "full"):
            seconds[name, depth] = _capture(name, "8B", depth)["cpu_seconds"]
        report.rows.append(
            Row(
                workload="llama3 8B by depth",
                metric=f"capture_cpu, {depth} layers",
                unit="CPU s",
                ours=Sample.of([seconds["stamped", depth]]),
                peer=Sample.of([seconds["full", depth]]),
                peer_name="ours, all layers traced",
            )
        )
    report.notes.append(_drawing(seconds))


def _drawing(seconds: dict[tuple[str, int], float]) -> str:
    """Bars of CPU seconds by depth."""
    longest = max(seconds.values())
    lines = ["CPU seconds by number of layers (# stamped, . all layers traced)"]
    for (name, depth), value in seconds.items():
        bar = ("#" if name == "stamped" else ".") * round(_BAR_WIDTH * value / longest)
        lines.append(f"{depth:5d} {value:7.1f} {bar}")
    return "\n".join(lines)


def _capture(contestant: str, workload: str, num_layers: int) -> dict[str, Any]:
    """Run one capture in a process of its own."""
    return record_of("capture.one_capture", contestant, workload, str(num_layers))


if __name__ == "__main__":
    sys.exit(main())
