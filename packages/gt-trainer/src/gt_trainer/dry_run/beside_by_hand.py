"""A planned step beside the same run placed by hand: is the plan worth it, by the same simulator?

A plan is the best by the planner's prices. Those are sums over windows; a simulated step has a
graph, its passes and streams. So both are simulated: the step that is planned, and the one that
torchtitan's own parallelism makes of the same degrees, batch and options, captured and put through
the same recipe.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.simulated_pipeline import SimulatedPipeline
from gt_trainer.dry_run.simulated_run import SimulatedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedByHand:
    """The run without a solver, at the same degrees."""

    planned: SimulatedRun | SimulatedPipeline
    by_hand: SimulatedRun | SimulatedPipeline

    @property
    def time_ratio(self) -> float:
        """Simulated time of the planned step in units of that by hand."""
        return self.planned.step_us / self.by_hand.step_us

    @property
    def memory_ratio(self) -> float:
        """Estimated peak of a rank, of a pipeline's fullest one, likewise."""
        return self.planned.peak_bytes / self.by_hand.peak_bytes

    def __str__(self) -> str:
        """Lines for a terminal."""
        rows = (("planned", self.planned), ("by hand", self.by_hand))
        lines = [
            f"  {name:<16} {ms(run.step_us)} a step, {ms(_exposed_us(run))} exposed communication, "
            f"{run.peak_bytes / GIB:.2f} GiB{'' if run.fits else ' (DOES NOT FIT)'}"
            for name, run in rows
        ]
        differences = (
            f"{_percent(self.time_ratio, 'more', 'less')} time",
            f"{_percent(self.memory_ratio, 'more', 'less')} memory",
        )
        return "\n".join(
            [
                "Planned and placed by hand at the same degrees, both simulated",
                *lines,
                f"  the plan takes   {', '.join(differences)}",
            ]
        )


def _exposed_us(run: SimulatedRun | SimulatedPipeline) -> float:
    return run.all_exposed_us if isinstance(run, SimulatedPipeline) else run.exposed_us


def _percent(ratio: float, more: str, less: str) -> str:
    return f"{abs(ratio - 1):.1%} {more if ratio >= 1 else less}"
