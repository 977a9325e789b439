"""What of the time a cluster really trains, when its GPUs fail: checkpoints, losses, restarts.

A run writes a checkpoint every interval and loses, at a failure, what it did since the last one,
and the time to start again. The interval that wastes least is about sqrt(2 * write * MTBF): Young
(CACM 1974), and to the next order Daly (FGCS 2006). The default rate is that of 419 interruptions
in 54 days on 16,384 GPUs (*The Llama 3 Herd of Models*, arXiv 2407.21783, section 3.3.4), counted
per GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LLAMA3_FAILURES_PER_GPU_DAY = 419 / (54 * 16_384)
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How failures slow a run down. Seconds."""

    seconds_between_failures: float
    checkpoint_every_seconds: float
    fraction: float
    """Of the time, what is spent on steps that count."""


def goodput(
    num_gpus: int,
    *,
    failures_per_gpu_day: float,
    checkpoint_seconds: float,
    restart_seconds: float,
) -> Goodput:
    """Expected goodput with the best interval between checkpoints, to first order.

    Args:
        num_gpus: any of which stops all.
        failures_per_gpu_day: interruptions of one GPU.
        checkpoint_seconds: for which a checkpoint stops training.
        restart_seconds: from a failure to the next step.

    Raises:
        ValueError: a number that is not above 0.
    """
    numbers = (num_gpus, failures_per_gpu_day, checkpoint_seconds, restart_seconds)
    if min(numbers) <= 0:
        raise ValueError(f"goodput of {numbers!r}; allowed: numbers above 0")
    between = _SECONDS_PER_DAY / (num_gpus * failures_per_gpu_day)
    every = optimal_interval_seconds(checkpoint_seconds, between)
    writing = checkpoint_seconds / (every + checkpoint_seconds)
    # A failure comes in the middle of an interval, on average.
    lost = (every / 2 + restart_seconds) / (between + restart_seconds)
    return Goodput(
        seconds_between_failures=between,
        checkpoint_every_seconds=every,
        fraction=max(0.0, (1 - writing) * (1 - lost)),
    )


def optimal_interval_seconds(checkpoint_seconds: float, between_failures: float) -> float:
    """Time of training between two checkpoints that loses least (Daly 2006, eq. 37)."""
    cost, mean = checkpoint_seconds, between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
