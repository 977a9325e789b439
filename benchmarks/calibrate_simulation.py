"""Which of the cost model's assumptions can this GPU replace by measurements?

Measures the host's times, launches, kernels in a stream and in a CUDA graph, matrix products and
copies, and writes a hardware file with them::

    python benchmarks/calibrate_simulation.py --out my_h100.json [--base FILE]
    gt-train --config llama3_8b --dry-run --hardware my_h100.json

The published file stays as it is: its values are those of publications, and simulated results are
told with it. What one GPU cannot tell (the network, NCCL between ranks) is taken from the base.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import torch
import torch.distributed as dist
from calibration.constants import CalibrationError, Measured, Scale, calibrate, hardware_document
from calibration.machine import Machine, TorchMachine

from gt_passes.simulation import Hardware, h100_sxm
from gt_passes.simulation.hardware import HardwareDataError, load_hardware

_BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    problem = problem_with_output(options.out)
    if problem is None and not torch.cuda.is_available():
        problem = "needs a CUDA device, and this machine has none"
    if problem is not None:
        sys.stderr.write(f"calibrate_simulation: {problem}\n")
        return _BAD_INPUT
    try:
        base = h100_sxm() if options.base is None else load_hardware(options.base.read_text())
        with _one_rank("nccl"):
            machine = TorchMachine(torch.device("cuda", torch.cuda.current_device()))
            found = write_calibration(machine, base, options.out, Scale(samples=options.samples))
    except (CalibrationError, HardwareDataError) as error:
        sys.stderr.write(f"calibrate_simulation: {error}\n")
        return 1
    sys.stdout.write(_table(base, found) + f"\n\nwritten: {options.out}\n")
    return 0


def problem_with_output(path: Path) -> str | None:
    """Why a file must not be written; None if it may."""
    published = Path(str(resources.files("gt_passes.simulation"))) / "h100_sxm.json"
    if path.resolve() == published.resolve():
        return f"--out is the published file {path}, which holds what was published: name another"
    if path.exists():
        return f"--out {path} exists: name a file that does not"
    if not path.parent.is_dir():
        return f"--out {path} is in a folder that does not exist"
    return None


def write_calibration(
    machine: Machine, base: Hardware, path: Path, scale: Scale
) -> dict[str, Measured]:
    """Measure, write the hardware file, and read it as the simulation will."""
    found = calibrate(machine, base, scale)
    document = hardware_document(
        base,
        found,
        device_name=machine.device_name,
        versions=f"torch {torch.__version__}, Python {platform.python_version()}",
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )
    text = json.dumps(document, indent=1) + "\n"
    load_hardware(text)
    path.write_text(text)
    return found


def _table(base: Hardware, found: dict[str, Measured]) -> str:
    lines = [f"{'constant':<26}{'base':>10}{'measured':>10}   range"]
    lines += [
        f"{name:<26}{getattr(base, name):>10.4g}{each.value:>10.4g}"
        f"   {each.low:.4g} to {each.high:.4g}"
        for name, each in found.items()
    ]
    return "\n".join(lines)


@contextmanager
def _one_rank(backend: str) -> Iterator[None]:
    """A process group of this rank alone, for the host's part in collectives."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the hardware file to write")
    parser.add_argument("--base", type=Path, help="hardware file to start from (default: H100 SXM)")
    parser.add_argument("--samples", type=int, default=15, help="measurements of each constant")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
