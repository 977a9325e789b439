"""What is measured of a step: its time, the host's, launches, when the GPU stood still, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One step."""

    step_ms: float
    """From an idle device until it is idle again."""

    host_ms: float
    """Until the host had issued all of it; with a full queue of launches, it waits meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """One step under the profiler, which slows the host down: for counts and for gaps."""

    launches: int
    """Calls that launch kernels or CUDA graphs."""

    idle: float | None
    """The part of the time from the first kernel to the last in which none ran; None without one.
    The host is slower than without the profiler, so this is a bound from above."""


def timed(step: Callable[[], object], device: torch.device) -> Timed:
    synchronize(device)
    begin = time.perf_counter()
    results = step()
    issued = time.perf_counter()
    synchronize(device)
    end = time.perf_counter()
    del results
    return Timed(step_ms=1e3 * (end - begin), host_ms=1e3 * (issued - begin))


def profiled(step: Callable[[], object], device: torch.device) -> Profiled:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        synchronize(device)
    events = list(profile.events())
    on_device = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
    ]
    return Profiled(
        launches=sum(event.name.startswith(_LAUNCHES) for event in events),
        idle=idle_part(on_device),
    )


def idle_part(spans: Iterable[tuple[float, float]]) -> float | None:
    """The part of the time from the first begin to the last end that no span covers."""
    ordered = sorted(spans)
    if not ordered:
        return None
    first, covered_until = ordered[0][0], ordered[0][0]
    covered = 0.0
    for begin, end in ordered:
        covered += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    whole = covered_until - first
    return 1 - covered / whole if whole > 0 else 0.0


def peak_gib(step: Callable[[], object], device: torch.device) -> float | None:
    """The most that the allocator has given out at once, parameters included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
