"""How long a call takes when it is made without a pause, until power or heat limits the device."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BURST_SECONDS = 0.05
"""What is issued at once: long beside the time to issue it, short beside the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """Of the second half of a time in which the device had no pause."""

    call_us: tuple[float, ...]
    """Microseconds of a call, on average, for each burst of calls."""

    told: str | None
    """What the driver said meanwhile of its clock and its power; None without such a driver."""


def sustained(call: Callable[[], object], device: torch.device, seconds: float) -> Sustained:
    """Times a call that the device makes without a pause.

    Args:
        call: warm: it compiles nothing and chooses no algorithm any more.
        device: what the call runs on; on a CPU the host's clock times it.
        seconds: how long; what is told is of the second half.
    """
    num_calls = max(1, round(_BURST_SECONDS / _burst(call, device, 3)()))
    begin = time.perf_counter()
    bursts: list[float] = []
    asked: subprocess.Popen[str] | None = None
    in_second_half = 0
    waiting = _burst(call, device, num_calls)
    while time.perf_counter() < begin + seconds or in_second_half == 0:
        following = _burst(call, device, num_calls)  # issued before the one before it has ended
        bursts.append(waiting())
        waiting = following
        if time.perf_counter() > begin + seconds / 2:
            in_second_half += 1
            if asked is None and device.type == "cuda":
                asked = _ask_driver(device)
    bursts.append(waiting())
    told = None if asked is None else asked.communicate()[0].strip() or None
    return Sustained(call_us=tuple(1e6 * each for each in bursts[-in_second_half:]), told=told)


def _burst(call: Callable[[], object], device: torch.device, num_calls: int) -> Callable[[], float]:
    """Issues calls; what is returned waits for them and tells the seconds of one."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        took = (time.perf_counter() - begin) / num_calls
        return lambda: took
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(num_calls):
        call()
    last.record()

    def seconds() -> float:
        last.synchronize()
        return 1e-3 * first.elapsed_time(last) / num_calls

    return seconds


def _ask_driver(device: torch.device) -> subprocess.Popen[str] | None:
    command = ["nvidia-smi", "--format=csv,noheader", "--query-gpu=clocks.sm,power.draw"]
    try:
        return subprocess.Popen(
            [*command, f"--id={device.index or 0}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except FileNotFoundError:
        return None
