"""Why tensors lie as they do, for the page of a dry run: a run itself waits for no answers."""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan.tools.logging import logger

from gt_autoparallel import PlacementPlan, next_best_layouts
from gt_trainer.placement.planned_machine import planned_machine

REASON_SECONDS = 20.0
"""What searches for other plans may take, of all plans of a run."""


def reasons_of_dry_run(plan: PlacementPlan, *, num_plans: int = 1) -> Mapping[str, object]:
    """What the next best layout of each parameter would cost, by name; nothing in a real run.

    Args:
        plan: of a model or of one of its parts.
        num_plans: among which the time is divided.
    """
    if not planned_machine().is_simulated:
        return {}
    seconds = REASON_SECONDS / num_plans
    logger.info(f"Placement: pricing the next best layouts, {seconds:.0f} s at most")
    return next_best_layouts(plan, time_limit_seconds=seconds)
