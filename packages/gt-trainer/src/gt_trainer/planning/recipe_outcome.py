"""Time and memory of a simulated step. Plain data, which children send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gt_trainer.dry_run.step_over_time import MemoryOverStep, StepTimeline
from gt_trainer.planning.run_recipe import RunRecipe

_HOURS = 3600.0
_TRILLION = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOutcome:
    """One recipe on one machine, simulated."""

    recipe: RunRecipe
    step_us: float
    tokens_per_second_per_gpu: float
    mfu: float
    computing_us: float
    """Operators, the mean over pipeline ranks."""

    exposed_us: Mapping[str, float]
    """Communication for which computation stands still, by what it is for."""

    bubble: float
    """Part of the step in which ranks of a pipeline wait for one another."""

    optimizer_us: float
    memory: Mapping[str, int]
    """Bytes of the fullest rank at its peak, by kind."""

    memory_over_step: MemoryOverStep
    """Memory of the fullest rank over the step."""

    timeline: StepTimeline
    """Work of the ranks over a step."""

    peak_bytes: int
    capacity_bytes: int
    moved: Mapping[str, float]
    """Step time with one group of the machine's constants changed, by what was done to it."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has the memory."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def all_exposed_us(self) -> float:
        """All of its communication that nothing hides."""
        return sum(self.exposed_us.values())

    def dollars_per_trillion_tokens(self, price_per_gpu_hour: float) -> float:
        """Return the cost of GPUs for a trillion tokens without a failure."""
        return self._gpu_hours * price_per_gpu_hour

    def megawatt_hours_per_trillion_tokens(self, watts_per_gpu: float) -> float:
        """Return the energy of the GPUs alone at their power limit."""
        return self._gpu_hours * watts_per_gpu / 1e6

    @property
    def _gpu_hours(self) -> float:
        return _TRILLION / self.tokens_per_second_per_gpu / _HOURS


def ranked(outcomes: Iterable[RecipeOutcome]) -> list[RecipeOutcome]:
    """Return the outcomes that fit, the fastest first."""
    return sorted((each for each in outcomes if each.fits), key=lambda each: each.step_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsimulated:
    """A recipe that could not be simulated."""

    recipe: RunRecipe
    reason: str
    """The reason in one line."""
