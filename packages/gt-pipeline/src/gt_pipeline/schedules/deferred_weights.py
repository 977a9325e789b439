"""Schedules that put off fewer gradients of weights (dW), to hold less memory.

A zero-bubble schedule runs dI alone where another rank waits for it, and its dW later, where the
rank would wait. What a dW needs is held until then. DualPipeV puts off as many as it has ranks when
it drains; with experts, whose inputs are a multiple of the activations, that can be most of a
GPU's memory::

    as it is        1I4 1I5 1I6 1I7 1W4 1W5 1W6 1W7
    two at most     1I4 1I5 1W4 1I6 1W5 1I7 1W6 1W7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.schedule import Schedule
from gt_pipeline.schedules.schedule_checks import check_schedule


def limit_deferred_weights(schedule: Schedule, max_deferred: int) -> Schedule:
    """The same schedule with at most so many dW put off on any rank.

    Where one more would be put off, the oldest runs first. Gradients of a stage are still added in
    the order of the schedule, so no bit of them changes.

    Args:
        schedule: of any name.
        max_deferred: dI whose dW has not run yet, on each rank; 1 or more.

    Raises:
        ScheduleError: the limit is below 1, or would add a stage's gradients in another order.
    """
    if max_deferred < 1:
        raise ScheduleError(
            what=f"max_deferred is {max_deferred}",
            problems=["a dW runs behind its dI, so one is always put off: allowed is 1 or more"],
        )
    compute = tuple(_limited(actions, max_deferred) for actions in schedule.compute)
    problems = [
        f"rank {rank} would add gradients of stage {stage} in another order"
        for rank, (before, after) in enumerate(zip(schedule.compute, compute, strict=True))
        for stage in schedule.stages_of_rank(rank)
        if _order_of_sums(before, stage) != _order_of_sums(after, stage)
    ]
    if problems:
        raise ScheduleError(
            what=f"{schedule.name} cannot put off at most {max_deferred} dW", problems=problems
        )
    limited = replace(schedule, compute=compute)
    check_schedule(limited)
    return limited


def max_deferred_weights(schedule: Schedule) -> int:
    """The most dW that any rank of a schedule puts off at once."""
    most = 0
    for actions in schedule.compute:
        deferred = 0
        for action in actions:
            for part in action.compute_parts:
                deferred += (part.kind == "BACKWARD_INPUT") - (part.kind == "BACKWARD_WEIGHT")
            most = max(most, deferred)
    return most


def _limited(actions: Sequence[Action], max_deferred: int) -> tuple[Action, ...]:
    deferred: list[Action] = []
    done: set[Action] = set()
    found: list[Action] = []
    for action in actions:
        if action in done:
            continue
        for part in action.compute_parts:
            if part.kind == "BACKWARD_INPUT":
                if len(deferred) == max_deferred:
                    oldest = deferred.pop(0)
                    done.add(oldest)
                    found.append(oldest)
                deferred.append(Action(part.stage, "BACKWARD_WEIGHT", part.microbatch))
            elif part.kind == "BACKWARD_WEIGHT":
                deferred.remove(part)
        found.append(action)
    return tuple(found)


def _order_of_sums(actions: Sequence[Action], stage: int) -> list[int | None]:
    return [
        part.microbatch
        for action in actions
        for part in action.compute_parts
        if part.stage == stage and part.kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    ]
