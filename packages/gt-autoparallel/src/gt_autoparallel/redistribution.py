"""How a tensor gets from one layout to another, in steps that all of the package shares.

One list of steps is priced by the planner, counted by the prediction and run by the placed model,
so that what is predicted is what happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["RedistributionStep", "StepKind"]

StepKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"]
"""all_gather: S(d) -> R. reduce_scatter: P -> S(d). all_reduce: P -> R. all_to_all: S(a) -> S(b).
slice: R -> S(d), local: no communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionStep:
    """One collective, or one local slice, along one mesh axis."""

    kind: StepKind
    axis: int
    """Index of the mesh axis."""

    source_dim: int | None
    """Sharded dim before the step: of all_gather and all_to_all."""

    target_dim: int | None
    """Sharded dim after the step: of reduce_scatter, all_to_all and slice."""

    input_shape: tuple[int, ...]
    """Shape of each rank's tensor before the step."""

    output_shape: tuple[int, ...]
    """Shape of each rank's tensor after the step."""
