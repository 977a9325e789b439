"""How many forwards' saved values each rank holds at once, read off a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.schedule import Schedule

_RELEASES = ("FULL_BACKWARD", "BACKWARD_WEIGHT")


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """The most chunks that are live at once, by rank.

    A chunk is what one stage saves for one microbatch: from its forward until its whole backward,
    or its dW, is done. Forward and backward of one OVERLAP_F_B are live together. Without any
    backward nothing is saved, and the answer is 0.
    """
    if schedule.is_forward_only:
        return (0,) * schedule.num_ranks
    return tuple(
        # Before an action releases anything, what it saves is there too.
        max(map(add, live_after_each(actions), map(_num_released, actions)), default=0)
        for actions in schedule.compute
    )


def live_after_each(actions: Iterable[Action]) -> list[int]:
    """How many chunks are live after each action of a rank; others than compute change nothing."""
    live = 0
    counts: list[int] = []
    for action in actions:
        live += sum(part.kind == "FORWARD" for part in action.compute_parts)
        live -= _num_released(action)
        counts.append(live)
    return counts


def _num_released(action: Action) -> int:
    return sum(part.kind in _RELEASES for part in action.compute_parts)
