"""Which of several plans a run takes, by their simulated steps: what a plan says of its rivals.

A plan is the cheapest by prices that are sums over windows. A step has streams, buckets and a
graph; who captures and simulates it knows better. So the planner's plan may be set beside those
that experts would make, and the one whose step is fastest is taken. All of them stand in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStep:
    """The simulated step of a plan."""

    step_us: float
    peak_bytes: int
    """Of a rank."""

    fits: bool
    """Whether the machine has so much memory."""

    def is_better_than(self, other: JudgedStep) -> bool:
        """Whether it alone fits, or is faster; where neither fits, whether it takes less memory."""
        if self.fits != other.fits:
            return self.fits
        if self.fits:
            return self.step_us < other.step_us
        return self.peak_bytes < other.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One of the plans, or why it was not simulated."""

    name: str
    objective_us: float | None
    """What it costs by the planner's prices; None if there is no plan, or none was looked for since
    every one is too dear: ``reason`` has the bound then."""

    step: JudgedStep | None
    """None if it was not simulated."""

    reason: str = ""
    """Why it was not."""

    def __str__(self) -> str:
        if self.step is None:
            return f"{self.name}: {self.reason}"
        fits = "" if self.step.fits else ", does not fit"
        return (
            f"{self.name}: {self.step.step_us / 1e3:,.1f} ms, "
            f"{self.step.peak_bytes / _GIB:.2f} GiB{fits}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJudgement:
    """Which plan was taken, and all that could have been."""

    chosen: str
    """Name of a candidate."""

    candidates: tuple[Candidate, ...]
    """The planner's own first."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """One line for each candidate; the chosen one is marked."""
        for each in self.candidates:
            yield f"{'taken: ' if each.name == self.chosen else ''}{each}"


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the fastest step of those that fit; of equals the first.

    If none fits, the one that takes the least memory.

    Args:
        candidates: of which at least one was simulated.
    """
    first, *others = [each for each in candidates if each.step is not None]
    for each in others:
        assert each.step is not None
        assert first.step is not None
        if each.step.is_better_than(first.step):
            first = each
    return first
