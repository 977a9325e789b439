"""How far is the cost model's time of an operator from that of this GPU?

Times the operators that decide a step (dense, float8 and grouped products, attention by each
kernel), each alone on an idle device, and puts the simulation's time beside it::

    python benchmarks/bench_gpu_operators.py [--json FILE] [--hardware FILE] [--sustained 3]

``ours`` is simulated, ``peer`` is measured. With ``--sustained``, each is also called without a
pause for so many seconds, until the device's power or heat limits its clock. What overlaps, waits
for the host or competes for memory bandwidth in a step is not in these numbers: ``bench_gpu_step``
has that.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from calibration.machine import TorchMachine
from gpu_operators.operator_cases import Case, operator_cases
from report import Report, Row, Sample
from sustained import sustained

from gt_passes.simulation import Hardware, device_time, h100_sxm
from gt_passes.simulation.hardware import load_hardware

_NUM_CALLS = 5
"""In one measurement; the first, which may compile or choose an algorithm, is before it."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("bench_gpu_operators: needs a CUDA device, and this machine has none\n")
        return 2
    hardware = (
        h100_sxm() if options.hardware is None else load_hardware(options.hardware.read_text())
    )
    machine = TorchMachine(device)
    report = Report(benchmark="gpu_operators")
    report.notes.append(f"ours is simulated, with the constants of {hardware.name}")
    for name, make in operator_cases(device, shrink=options.shrink):
        if options.only not in name:
            report.notes.append(f"{name}: not asked for by --only")
            continue
        try:
            case = make()
            samples = _microseconds(case.run, machine, options.samples)
        except Exception as error:  # noqa: BLE001  # one that this device lacks must not end others
            first = (str(error).splitlines() or [""])[0]
            report.notes.append(f"{name}: {type(error).__name__}: {first}")
            continue
        report.rows.append(_row(name, case, samples, hardware))
        report.notes.append(f"{name}: {_tflops_per_s(case, samples, hardware):.0f} TFLOP/s")
        if options.sustained is not None:
            load = sustained(case.run, device, options.sustained)
            told = f"{name}, sustained"
            report.rows.append(_row(told, case, load.call_us, hardware))
            rate = _tflops_per_s(case, load.call_us, hardware)
            report.notes.append(f"{told}: {rate:.0f} TFLOP/s, {load.told or 'clock unknown'}")
        _write(report, options.json)
        del case
        gc.collect()
    _write(report, options.json)
    print(report.table())
    if not report.rows:
        sys.stderr.write("bench_gpu_operators: nothing was measured; the notes say why\n")
    return 0 if report.rows else 1


def _write(report: Report, path: Path | None) -> None:
    """What is there so far, for a run that ends early."""
    if path is not None:
        report.write(path)


def _microseconds(
    run: Callable[[], object], machine: TorchMachine, num_samples: int
) -> list[float]:
    """Of one call, several times."""

    def calls() -> None:
        for _ in range(_NUM_CALLS):
            run()

    run()
    return [machine.call_us(calls) / _NUM_CALLS for _ in range(num_samples)]


def _row(name: str, case: Case, samples: Sequence[float], hardware: Hardware) -> Row:
    simulated_us = device_time(case.work, hardware, masked=case.masked).total_us
    return Row(
        workload="operators",
        metric=name,
        unit="us",
        ours=Sample.of([simulated_us]),
        peer=Sample.of(samples),
        peer_name="this GPU",
        simulated=True,
    )


def _tflops_per_s(case: Case, samples: Sequence[float], hardware: Hardware) -> float:
    density = hardware.attention_mask_density if case.masked else 1.0
    return case.work.flops * density / statistics.median(samples) / 1e6


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--hardware", type=Path, help="hardware file (default: H100 SXM)")
    parser.add_argument("--samples", type=int, default=5, help="of each operator (default: 5)")
    parser.add_argument("--only", default="", help="only those whose name contains this")
    parser.add_argument(
        "--sustained", type=float, metavar="SECONDS", help="call each for so long, too"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shrink", type=int, default=1, help="divide sizes, for trials")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    if options.sustained is not None and options.sustained <= 0:
        parser.error("--sustained must be more than 0 seconds")
    return options


if __name__ == "__main__":
    sys.exit(main())
