"""What the fullest rank of a simulated step holds over time, by kind: a few moments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gt_pipeline.estimates import MemoryPart
    from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline
    from gt_trainer.dry_run.simulated_run import SimulatedRun

_MOST_MOMENTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAt:
    """What is held from a moment to the next one."""

    start_us: float
    held: Mapping[str, int]
    """Bytes by kind."""

    @property
    def num_bytes(self) -> int:
        """Of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverStep:
    """From the beginning of a graph or a schedule to the end of the optimizer."""

    moments: tuple[HeldAt, ...]
    """By time; the peak is one of them."""

    end_us: float
    what: str
    """Which part of a step it is, and of which rank."""


def memory_of_run(run: SimulatedRun) -> MemoryOverStep:
    """Of the graph that needs the most memory, with what is held beside it."""
    by_kind = run.graph.memory.live_bytes_by_kind
    moments = [
        HeldAt(start_us=start, held=run.held_with(dict(zip(by_kind, held, strict=True))))
        for start, *held in zip(run.graph.memory_at_us, *by_kind.values(), strict=True)
    ]
    end_us = run.graph.step_us + run.optimizer_us
    times = run.facts.num_microbatches
    which = "the step" if times == 1 else f"one of {times} microbatches and the optimizer"
    return MemoryOverStep(moments=tuple(thinned(moments, end_us)), end_us=end_us, what=which)


def memory_of_pipeline(run: SimulatedPipeline) -> MemoryOverStep:
    """Of the pipeline rank that needs the most."""
    fullest = max(run.memory, key=lambda each: each.peak_bytes)
    starts = [
        span.start
        for span in run.time.timeline.spans
        if span.rank == fullest.rank
        and (span.action.is_compute or span.action.kind in ("UNSHARD", "REDUCE_GRAD"))
    ]
    starts += [run.time.makespan] * (len(fullest.moments) - len(starts))
    moments = [
        HeldAt(start_us=start, held=_by_name(moment.bytes_by_part))
        for start, moment in zip(itertools.accumulate(starts, max), fullest.moments, strict=True)
    ]
    end_us = run.time.makespan + run.optimizer_us
    times = run.facts.num_microbatches
    which = "the step" if times == 1 else f"one of {times} runs of the schedule and the optimizer"
    return MemoryOverStep(
        moments=tuple(thinned(moments, end_us)),
        end_us=end_us,
        what=f"{which}, on pipeline rank {fullest.rank}",
    )


def _by_name(parts: Mapping[MemoryPart, int]) -> dict[str, int]:
    return {str(part): num_bytes for part, num_bytes in parts.items()}


def thinned(
    moments: Sequence[HeldAt], end_us: float, *, most: int = _MOST_MOMENTS
) -> Iterator[HeldAt]:
    """At most so many: of those that begin in the same part of the time the fullest one.

    Args:
        moments: by time.
        end_us: until when the last one lasts.
        most: parts of the time.
    """
    part_us = end_us / most or 1.0
    for _, together in itertools.groupby(
        moments, lambda each: min(each.start_us // part_us, most - 1)
    ):
        some = list(together)
        fullest = max(some, key=lambda each: each.num_bytes)
        yield HeldAt(start_us=some[0].start_us, held=fullest.held)
