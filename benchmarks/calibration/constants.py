"""From what a machine answers to the constants of the cost model.

Each method follows from what the constant means where it is read (``gt_passes.simulation``), and
its words become the constant's source. A result is the median of the samples; its range is told.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from calibration.machine import Machine, Work
from gt_passes.simulation import Hardware, MatmulShape
from gt_passes.simulation.compute_model import matmul_us

_LEAST_US = 0.01
"""Constants are above 0; what comes out as nothing, or less than it, counts as this."""

_MATMULS = (
    (8192, 8192, 8192),
    (8192, 14336, 4096),  # tokens x hidden x model of Llama 3 8B, one sequence of 8,192
    (8192, 4096, 14336),
    (8192, 6144, 4096),
)


class CalibrationError(RuntimeError):
    """What was measured cannot be: another machine than the base file's, or a wrong clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. The defaults are for a GPU."""

    samples: int = 15
    calls: int = 200
    """Operators of a measurement of overheads; few enough for the queue of launches, 1,024."""

    copy_bytes: int = 1 << 30
    host_copy_bytes: int = 256 << 20
    matmuls: tuple[tuple[int, int, int], ...] = _MATMULS
    grouped: tuple[int, int, int, int] = (16384, 8192, 5120, 16)
    """Rows of all groups, n, k, and groups."""

    attention: tuple[int, int, int] = (32, 8192, 128)
    """Heads, length, head dim."""

    gather: tuple[int, int, int] = (128256, 4096, 16384)
    """Rows of the table, its width, rows gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One constant."""

    value: float
    low: float
    high: float
    num_samples: int
    method: str


def calibrate(machine: Machine, base: Hardware, scale: Scale) -> dict[str, Measured]:
    """Measure what the published file assumes, by the name of the constant.

    Args:
        machine: answers.
        base: data-sheet values, of which efficiencies are fractions.
        scale: how much to measure.

    Raises:
        CalibrationError: an efficiency above 1: ``base`` is not of this machine.
    """
    kernels = Work(kind="kernel", count=scale.calls)
    one = Work(kind="kernel")

    def sampled(method: str, sample: Callable[[], float]) -> Measured:
        values = [sample() for _ in range(scale.samples)]
        return Measured(
            value=max(statistics.median(values), _LEAST_US),
            low=min(values),
            high=max(values),
            num_samples=len(values),
            method=method,
        )

    def issued(work: Work, method: str) -> Measured:
        return sampled(method, lambda: machine.issue_us(work) / work.count)

    found = {
        "host_kernel_us": issued(
            kernels,
            f"host time of {scale.calls} small element-wise operators, called by the code of a "
            "graph while the device is idle, by operator",
        ),
        "host_view_us": issued(
            Work(kind="view", count=scale.calls), f"host time of {scale.calls} views, by view"
        ),
        "host_collective_us": issued(
            Work(kind="collective", count=scale.calls // 4),
            f"host time of launching {scale.calls // 4} small all-gathers in a group of one rank, "
            "by launch",
        ),
        "host_wait_us": issued(
            Work(kind="wait", count=scale.calls // 4),
            f"host time of {scale.calls // 4} waits for all-gathers that are done, by wait",
        ),
        "kernel_fixed_us": sampled(
            f"device time of {scale.calls} small element-wise kernels that were all issued before "
            "the first began, by kernel",
            lambda: machine.run_us(kernels) / scale.calls,
        ),
    }
    fixed_us = found["kernel_fixed_us"].value
    issue_us = found["host_kernel_us"].value
    found["graph_replay_kernel_us"] = sampled(
        f"device time of the same {scale.calls} kernels in one CUDA graph, by kernel, less "
        "kernel_fixed_us; 0.01 if that leaves nothing",
        lambda: machine.replay_us(kernels) / scale.calls - fixed_us,
    )
    found["launch_latency_us"] = sampled(
        "from the call of one small kernel on an idle device until the host sees its event, less "
        "host_kernel_us and kernel_fixed_us",
        lambda: machine.answer_us(one) - issue_us - fixed_us,
    )
    found |= _efficiencies(machine, base, scale, fixed_us, sampled)
    _refuse_impossible(machine, base, found)
    return found


def _efficiencies(
    machine: Machine,
    base: Hardware,
    scale: Scale,
    fixed_us: float,
    sampled: Callable[[str, Callable[[], float]], Measured],
) -> dict[str, Measured]:
    def matmul_efficiency(
        shape: tuple[int, int, int], kind: Literal["matmul", "float8_matmul"] = "matmul"
    ) -> float:
        m, n, k = shape
        work = Work(kind=kind, count=4, shape=shape)
        dtype = torch.bfloat16 if kind == "matmul" else torch.float8_e4m3fn
        at_peak_us = matmul_us(MatmulShape(m=m, n=n, k=k), dtype, base, efficiency=1.0)
        return at_peak_us / (machine.run_us(work) / work.count - fixed_us)

    def grouped_efficiency() -> float:
        m, n, k, groups = scale.grouped
        work = Work(kind="grouped_matmul", shape=scale.grouped)
        shape = MatmulShape(m=m // groups, n=n, k=k, batch=groups)
        at_peak_us = matmul_us(shape, torch.bfloat16, base, efficiency=1.0)
        return at_peak_us / (machine.run_us(work) - fixed_us)

    def attention_efficiency(kind: Literal["attention_forward", "attention_backward"]) -> float:
        heads, length, head_dim = scale.attention
        products = 5 if kind == "attention_backward" else 2
        flops = products * 2 * heads * length**2 * head_dim * base.attention_mask_density
        busy_us = machine.run_us(Work(kind=kind, shape=scale.attention)) - fixed_us
        return 1e6 * flops / base.peak_bf16_flops_per_s / busy_us

    def rate(work: Work, bytes_moved: int) -> float:
        return 1e6 * bytes_moved / (machine.run_us(work) / work.count - fixed_us)

    def gathered_bytes() -> int:
        _, width, rows = scale.gather
        return rows * (2 * 2 * width + 8)  # bfloat16 in and out, and the row's number

    copy = Work(kind="copy", count=4, num_bytes=scale.copy_bytes)
    gather = Work(kind="gather", count=4, shape=scale.gather)
    to_host = Work(kind="to_host", num_bytes=scale.host_copy_bytes)
    from_host = Work(kind="from_host", num_bytes=scale.host_copy_bytes)
    shapes = ", ".join("x".join(map(str, shape)) for shape in scale.matmuls)
    heads, length, head_dim = scale.attention
    attention = (
        f"compiled FlexAttention, causal, {heads} heads of {head_dim}, {length} tokens, bfloat16: "
        "half of all pairs at peak over the device's time; "
    )
    return {
        "matmul_efficiency": sampled(
            f"bfloat16 products of random numbers ({shapes}): the model's time at peak, partly "
            "filled waves included, over the device's; the median shape",
            lambda: statistics.median(map(matmul_efficiency, scale.matmuls)),
        ),
        "matmul_fp8_efficiency": sampled(
            f"the same of float8, scaled tensor-wise ({shapes}); the median shape",
            lambda: statistics.median(
                matmul_efficiency(shape, "float8_matmul") for shape in scale.matmuls
            ),
        ),
        "grouped_matmul_efficiency": sampled(
            "torch._grouped_mm in bfloat16, {}x{}x{} in {} equal groups: the model's time at peak "
            "over the device's".format(*scale.grouped),
            grouped_efficiency,
        ),
        "attention_forward_efficiency": sampled(
            f"{attention}forward", lambda: attention_efficiency("attention_forward")
        ),
        "attention_backward_efficiency": sampled(
            f"{attention}backward, five products",
            lambda: attention_efficiency("attention_backward"),
        ),
        "hbm_irregular_efficiency": sampled(
            "rows of a bfloat16 table of {} x {}, {} of them, bytes read and written".format(
                *scale.gather
            ),
            lambda: rate(gather, gathered_bytes()) / base.hbm_bytes_per_s,
        ),
        "hbm_streaming_efficiency": sampled(
            f"copies of {scale.copy_bytes >> 20} MiB on the device, bytes read and written",
            lambda: rate(copy, 2 * copy.num_bytes) / base.hbm_bytes_per_s,
        ),
        "pcie_efficiency": sampled(
            f"copies of {scale.host_copy_bytes >> 20} MiB between pinned memory and the device; "
            "the slower direction",
            lambda: (
                min(rate(each, each.num_bytes) for each in (to_host, from_host))
                / base.pcie_bytes_per_s
            ),
        ),
    }


def _refuse_impossible(machine: Machine, base: Hardware, found: Mapping[str, Measured]) -> None:
    problems = [
        f"{name} is {measured.value:.3g}"
        for name, measured in found.items()
        if name.endswith("_efficiency") and not 0 < measured.value <= 1
    ]
    if problems:
        raise CalibrationError(
            f"{'; '.join(problems)}: fractions of the data-sheet values of {base.name!r}, so that "
            f"is not what {machine.device_name!r} is. Name the hardware file of this machine"
        )


def hardware_document(
    base: Hardware, found: Mapping[str, Measured], *, device_name: str, versions: str, date: str
) -> dict[str, Any]:
    """A hardware data file: the base's constants, and those that were measured in their place.

    Args:
        base: of the same machine.
        found: by the name of the constant.
        device_name: that was measured.
        versions: of software, in words.
        date: of the measurement.
    """
    constants = {name: dataclasses.asdict(constant) for name, constant in base.constants.items()}
    for name, measured in found.items():
        constants[name] |= {
            "value": float(f"{measured.value:.4g}"),
            "kind": "own measurement",
            "source": (
                f"{measured.method}. {device_name}, {versions}, {date}: median of "
                f"{measured.num_samples}, {measured.low:.4g} to {measured.high:.4g}"
            ),
        }
    return {
        "name": f"{base.name}, calibrated on {device_name}",
        "fixed_on": date,
        "constants": constants,
    }
