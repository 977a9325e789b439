"""How much processor time do passes take, how does it grow, and what share has the verifier?

Ours against the passes of torchtitan's graph_trainer, on the same captured graph of Llama 3 8B on
64 ranks that do not exist, in turn::

    python benchmarks/bench_passes.py [--json FILE] [--samples 5] [--layers 8 32 126]

Both sides remove dead code, canonicalize views, gather each parameter once, and bucket and prefetch
by transformer block; neither recomputes or compiles. The verifier is timed apart, of Llama 3 405B
with 126 layers on 1,024 ranks too: what part of capture, passes and verification is it?
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from pathlib import Path

from graph_passes.captured import WORKLOADS, CapturedModel, captured_model
from graph_passes.peer import PEER_NAME, annotate_for_peer, run_peer_passes
from report import Report, Row, Sample

from gt_config import CompileConfig
from gt_passes import PassManagerReport, default_recipe

_RATIO_GOAL = 0.3
_GROWTH_GOAL = 1.1
_VERIFIER_GOAL = 0.1
_PEER_LAYERS = 32
_DEEP_LAYERS = 126


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--samples", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--deep-samples", type=int, default=3, help="of 405B; 0 to leave it out")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 126])
    options = parser.parse_args(arguments)
    if options.samples < 1 or len(options.layers) < 2:
        parser.error("--samples must be at least 1, and --layers at least two numbers")
    report = Report(benchmark="passes")
    seconds: dict[int, float] = {}
    for num_layers in options.layers:
        with captured_model(num_layers, WORKLOADS["8B"]) as model:
            print(f"{num_layers} layers captured", file=sys.stderr, flush=True)
            seconds[num_layers] = _measure(model, report, "8B", num_samples=options.samples)
    if options.deep_samples:
        with captured_model(_DEEP_LAYERS, WORKLOADS["405B"]) as model:
            print("405B captured", file=sys.stderr, flush=True)
            _measure(model, report, "405B", num_samples=options.deep_samples)
    exponent = _exponent(seconds)
    report.rows.append(
        Row(
            workload=f"llama3 8B, {min(seconds)} to {max(seconds)} layers",
            metric="growth of pass_time with layers",
            unit="exponent",
            ours=Sample.of([exponent]),
        )
    )
    report.notes.append(
        f"passes grow as n^{exponent:.2f}, asked for at most n^{_GROWTH_GOAL}: "
        f"{'met' if exponent <= _GROWTH_GOAL else 'missed'}"
    )
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _measure(model: CapturedModel, report: Report, workload: str, *, num_samples: int) -> float:
    """Add the rows of one model; returns the median seconds of our passes."""
    num_ranks = WORKLOADS[workload].world_size
    name = f"llama3 {workload}, {model.num_layers} layers, {num_ranks} ranks"
    is_goal = (workload, model.num_layers) in (("8B", _PEER_LAYERS), ("405B", _DEEP_LAYERS))
    ours, peers, verifier = [], [], []
    for _ in range(num_samples):
        record = _run_ours(model, verify=True)
        passes_ns = sum(each.elapsed.cpu_ns for each in record.records)
        passes_ns += record.recompilation.cpu_ns
        ours.append(passes_ns / 1e9)
        verifier.append((record.total.cpu_ns - passes_ns) / 1e9)
        if (workload, model.num_layers) == ("8B", _PEER_LAYERS):
            peers.append(_peer_seconds(model))
    row = Row(workload=name, metric="pass_time", unit="CPU s", ours=Sample.of(ours))
    if peers:
        row = Row(
            workload=name,
            metric="pass_time",
            unit="CPU s",
            ours=Sample.of(ours),
            peer=Sample.of(peers),
            peer_name=PEER_NAME,
            goal=_RATIO_GOAL,
        )
    report.rows.append(row)
    median = statistics.median(ours)
    beside = Sample.of(
        [
            model.capture_cpu_seconds + passes + verification
            for passes, verification in zip(ours, verifier, strict=True)
        ]
    )
    report.rows.append(
        Row(
            workload=name,
            metric="verification",
            unit="CPU s",
            ours=Sample.of(verifier),
            peer=beside,
            peer_name="our capture + passes + verification",
            goal=_VERIFIER_GOAL if is_goal else None,
        )
    )
    return median


def _run_ours(model: CapturedModel, *, verify: bool) -> PassManagerReport:
    graph_module = model.graph()
    options = CompileConfig(memory_policy="save_all", verify_passes=verify)
    gc.collect()
    return default_recipe(options, context=model.context(), reshard_after_forward=False).run(
        graph_module
    )


def _peer_seconds(model: CapturedModel) -> float:
    graph_module = model.graph()
    annotate_for_peer(graph_module)
    gc.collect()
    begin = time.process_time()
    run_peer_passes(graph_module, model)
    return time.process_time() - begin


def _exponent(seconds: dict[int, float]) -> float:
    """The slope of a line through the logarithms, by least squares."""
    points = [(math.log(layers), math.log(value)) for layers, value in seconds.items()]
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    return slope


if __name__ == "__main__":
    sys.exit(main())
