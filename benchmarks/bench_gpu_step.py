"""How long does a training step take on one GPU, and what does the host spend on it?

An 8B-shaped step of rank 0 of FSDP 4 x TP 2, whose other ranks do not exist (collectives do
nothing), and a whole 1B-shaped one: ours with each kind of compilation, with CUDA graphs and
without, beside eager execution, ``torch.compile``, and torchtitan's ``graph_trainer`` where it can
be imported::

    python benchmarks/bench_gpu_step.py [--json FILE] [--workload 1B] [--samples 9]

Forward, loss and gradients; no optimizer, which is the same for all. Contestants share the model,
are alive together with eager, and are stepped in turn with it. With ``--sustained`` each is also
stepped without a pause for so many seconds, until the device's power or heat limits its clock. On a
machine without CUDA it says so and ends; ``--device cpu`` with small sizes proves its Python, and
measures nothing of interest.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_step import contestants
from gpu_step.contestants import COMPILATIONS, Contestant
from gpu_step.measurement import Timed, peak_gib, profiled, timed
from gpu_step.model import LLAMA_1B, LLAMA_8B, LLAMA_8B_FSDP, Workload, batch, placed_model
from report import Report, Row, Sample
from sustained import Sustained, sustained

from gt_passes import CudaGraphs, DescribeOnly
from gt_passes.simulation import h100_sxm
from gt_passes.simulation.hardware import load_hardware

WORKLOADS = (LLAMA_8B, LLAMA_1B, LLAMA_8B_FSDP)
_NUM_WARMUP_STEPS = 3
"""One that compiles, one that records, one that replays."""


def main(arguments: list[str] | None = None, *, graphs: CudaGraphs | None = None) -> int:
    """Run the benchmark.

    Args:
        arguments: The command line; None takes that of the process.
        graphs: For tests: records on machines without CUDA.
    """
    options = _parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("bench_gpu_step: needs a CUDA device, and this machine has none\n")
        return 2
    report = Report(benchmark="gpu_step")
    report.notes.append(
        "forward, loss and gradients, without an optimizer; of several ranks one is there, and "
        "collectives do nothing: what communication costs is not in these numbers"
    )
    for workload in WORKLOADS:
        if options.workload in workload.name:
            changed = _changed(workload, options)
            try:
                _measure(changed, device, options, report, graphs)
            except Exception as error:  # noqa: BLE001  # one that fails must not end the others
                report.notes.append(f"{changed.name}: failed: {_line(error)}")
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    if not report.rows:
        sys.stderr.write("bench_gpu_step: nothing was measured; the notes say why\n")
    return 0 if report.rows else 1


def _measure(
    workload: Workload,
    device: torch.device,
    options: argparse.Namespace,
    report: Report,
    graphs: CudaGraphs | None,
) -> None:
    with placed_model(workload, device, float8=options.float8) as model:
        inputs = batch(workload, device)
        operators = contestants.num_operators(model, inputs)
        report.notes.append(f"{workload.name}: {operators} operators as captured")
        reference = contestants.eager(model)
        _warm_up(reference, inputs)
        eager_facts = _facts(reference, inputs, device)
        eager_load = _sustained(reference, inputs, device, options.sustained)
        for name, make in _makers(model, inputs, options, graphs):
            if options.only not in name:
                report.notes.append(f"{workload.name}: {name}: not asked for by --only")
                continue
            contestant = _made(make, workload, report)
            if contestant is None:
                continue
            try:
                pairs = _in_turn(reference, contestant, inputs, device, options.samples)
                ours, theirs = zip(*pairs, strict=True)
                report.rows += _rows(workload.name, contestant, ours, theirs, operators)
                report.rows += _simulated(workload.name, contestant, ours)
                load = _sustained(contestant, inputs, device, options.sustained)
                if load is not None and eager_load is not None:
                    report.rows.append(_sustained_row(workload.name, contestant, load, eager_load))
                    told = load.told or "clock unknown"
                    report.notes.append(f"{workload.name}: {contestant.name}, sustained: {told}")
                facts = _facts(contestant, inputs, device)
                report.rows += _counts(workload.name, contestant.name, facts, eager_facts)
                if contestant.note:
                    report.notes.append(f"{workload.name}: {contestant.name}: {contestant.note}")
            except Exception as error:  # noqa: BLE001  # one that fails must not end the others
                report.notes.append(f"{workload.name}: {contestant.name} failed: {_line(error)}")
            if options.json is not None:
                report.write(options.json)  # so far, for a run that ends early
            contestant.release()
            del contestant
            gc.collect()


def _makers(
    model: Any,
    inputs: tuple[torch.Tensor, ...],
    options: argparse.Namespace,
    graphs: CudaGraphs | None,
) -> Iterator[tuple[str, Callable[[], Contestant]]]:
    """Names and makers."""
    on_gpu = options.device == "cuda"
    backend = "inductor" if on_gpu else "eager"
    yield contestants.TORCH_COMPILE, lambda: contestants.torch_compile(model, backend=backend)
    yield contestants.GRAPH_TRAINER, lambda: contestants.graph_trainer(model, inputs)
    for compilation in COMPILATIONS:
        for recorded in (False, True):
            if recorded and not on_gpu and graphs is None:
                continue

            def make(compilation: Any = compilation, recorded: bool = recorded) -> Contestant:
                return contestants.ours(
                    model,
                    inputs,
                    compilation=compilation,
                    recorded=recorded,
                    memory_policy=options.memory_policy,
                    compiler=None if on_gpu else DescribeOnly(),
                    graphs=graphs,
                    hardware=load_hardware(options.hardware.read_text())
                    if options.hardware
                    else h100_sxm(),
                )

            yield contestants.name_of_ours(compilation, recorded=recorded), make


def _made(make: Callable[[], Contestant], workload: Workload, report: Report) -> Contestant | None:
    try:
        return make()
    except ImportError as error:
        report.notes.append(f"{workload.name}: a peer is not here: {_line(error)}")
    except Exception as error:  # noqa: BLE001  # one that fails must not end the others
        report.notes.append(f"{workload.name}: a contestant cannot be made: {_line(error)}")
    return None


def _line(error: Exception) -> str:
    """The error in one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _warm_up(contestant: Contestant, inputs: tuple[torch.Tensor, ...]) -> None:
    for _ in range(_NUM_WARMUP_STEPS):
        contestant.step(*inputs)


def _in_turn(
    reference: Contestant,
    contestant: Contestant,
    inputs: tuple[torch.Tensor, ...],
    device: torch.device,
    num_samples: int,
) -> list[tuple[Timed, Timed]]:
    """Steps of both, one after the other: (the contestant's, eager's)."""
    _warm_up(contestant, inputs)
    return [
        (
            timed(lambda: contestant.step(*inputs), device),
            timed(lambda: reference.step(*inputs), device),
        )
        for _ in range(num_samples)
    ]


def _sustained(
    contestant: Contestant,
    inputs: tuple[torch.Tensor, ...],
    device: torch.device,
    seconds: float | None,
) -> Sustained | None:
    if seconds is None:
        return None
    return sustained(lambda: contestant.step(*inputs), device, seconds)


def _sustained_row(
    workload: str, contestant: Contestant, ours: Sustained, theirs: Sustained
) -> Row:
    return Row(
        workload=f"{workload}, {contestant.name}",
        metric="sustained_step_time",
        unit="ms",
        ours=Sample.of([1e-3 * each for each in ours.call_us]),
        peer=Sample.of([1e-3 * each for each in theirs.call_us]),
        peer_name=contestants.EAGER,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    launches: int
    idle: float | None
    peak: float | None


def _facts(
    contestant: Contestant, inputs: tuple[torch.Tensor, ...], device: torch.device
) -> _Facts:
    peak = None
    if not contestant.is_recorded:
        peak = peak_gib(lambda: contestant.step(*inputs), device)
    profile = profiled(lambda: contestant.step(*inputs), device)
    return _Facts(launches=profile.launches, idle=profile.idle, peak=peak)


def _rows(
    workload: str,
    contestant: Contestant,
    ours: tuple[Timed, ...],
    theirs: tuple[Timed, ...],
    operators: int,
) -> list[Row]:
    def row(metric: str, unit: str, value: Callable[[Timed], float]) -> Row:
        return Row(
            workload=f"{workload}, {contestant.name}",
            metric=metric,
            unit=unit,
            ours=Sample.of(list(map(value, ours))),
            peer=Sample.of(list(map(value, theirs))),
            peer_name=contestants.EAGER,
        )

    return [
        row("gpu_step_time", "ms", lambda each: each.step_ms),
        row("host_per_operator", "us", lambda each: 1e3 * each.host_ms / operators),
    ]


def _simulated(workload: str, contestant: Contestant, ours: tuple[Timed, ...]) -> list[Row]:
    """What the simulation says of the same graph, beside what its step took."""
    told = {
        "simulated_compute": (contestant.simulated_ms, [each.step_ms for each in ours]),
        "simulated_host": (contestant.simulated_host_ms, [each.host_ms for each in ours]),
    }
    return [
        Row(
            workload=f"{workload}, {contestant.name}",
            metric=metric,
            unit="ms",
            ours=Sample.of([simulated_ms]),
            peer=Sample.of(measured_ms),
            peer_name="this machine, the same step",
            simulated=True,
        )
        for metric, (simulated_ms, measured_ms) in told.items()
        if simulated_ms is not None
    ]


def _counts(workload: str, name: str, facts: _Facts, eager: _Facts) -> list[Row]:
    found = {
        ("launches", ""): (facts.launches, eager.launches),
        ("gpu_idle", "of the step"): (facts.idle, eager.idle),
        ("peak_gib", "GiB"): (facts.peak, eager.peak),
    }
    return [
        Row(
            workload=f"{workload}, {name}",
            metric=metric,
            unit=unit,
            ours=Sample.of([ours]),
            peer=Sample.of([theirs]),
            peer_name=contestants.EAGER,
        )
        for (metric, unit), (ours, theirs) in found.items()
        if ours is not None and theirs is not None
    ]


def _changed(workload: Workload, options: argparse.Namespace) -> Workload:
    """The workload with other sizes or products, and a name that says so."""
    shape = workload.shape
    changes: dict[str, int] = {}
    if options.layers is not None:
        changes["num_layers"] = options.layers
    if options.width is not None:
        changes |= {"dim": options.width, "hidden": 2 * options.width, "vocab": 4 * options.width}
        changes |= {"num_heads": 8, "num_kv_heads": 4}
    if options.seq is not None:
        changes["seq"] = options.seq
    told = [f"{name} {value}" for name, value in changes.items()]
    if options.float8 is not None:
        told.append(f"float8 {options.float8}")
    if not told:
        return workload
    return dataclasses.replace(
        workload,
        name=f"{workload.name}, with {', '.join(told)}",
        shape=dataclasses.replace(shape, **changes),
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--workload", default="", help="only those whose name contains this")
    parser.add_argument("--samples", type=int, default=9, help="steps of each (default: 9)")
    parser.add_argument(
        "--sustained", type=float, metavar="SECONDS", help="step each for so long, too"
    )
    parser.add_argument("--only", default="", help="only contestants whose name contains this")
    parser.add_argument("--float8", metavar="RECIPE", help="of torchao: rowwise, tensorwise")
    parser.add_argument("--memory-policy", default="save_all", help="of ours (default: save_all)")
    parser.add_argument("--hardware", type=Path, help="file to simulate (default: H100 SXM)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--width", type=int, help="another width, and what goes with it")
    parser.add_argument("--seq", type=int, help="another sequence length")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    sharded = [w.name for w in WORKLOADS if options.workload in w.name and w.tp > 1]
    if options.float8 is not None and sharded:
        parser.error(
            "--float8 is measured without tensor parallelism: take --workload 'FSDP 8' or 1B"
        )
    if options.sustained is not None and options.sustained <= 0:
        parser.error("--sustained must be more than 0 seconds")
    return options


if __name__ == "__main__":
    sys.exit(main())
