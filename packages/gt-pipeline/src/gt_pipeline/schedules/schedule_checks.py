"""Whether a schedule can run and computes each microbatch once; every violation at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.actions import Action, ActionKind
from gt_pipeline.schedules.compute_order import compute_times
from gt_pipeline.schedules.costs import UNIT_COSTS
from gt_pipeline.schedules.schedule import Schedule

_F: Final = "FORWARD"
_B: Final = "FULL_BACKWARD"
_I: Final = "BACKWARD_INPUT"
_W: Final = "BACKWARD_WEIGHT"
_BEFORE: Mapping[ActionKind, ActionKind] = {_B: _F, _I: _F, _W: _I}


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run, or does not run every stage's microbatches once each.

    A schedule without any backward is one for evaluation, and right.

    Raises:
        ScheduleError: lists every violation.
    """
    problems = schedule_problems(schedule)
    if problems:
        raise ScheduleError(what=f"the schedule {schedule.name} cannot run", problems=problems)


def schedule_problems(schedule: Schedule) -> tuple[str, ...]:
    """Everything that is wrong with a schedule; nothing if it can run.

    Checked: each stage on one rank that exists; each rank has one; actions compute, on a stage of
    their rank, on a microbatch that exists; each stage and microbatch has one forward and one
    backward (``B``, or ``I`` and ``W``); a forward stands before its backward, ``I`` before ``W``;
    ranks never wait for each other in a circle.
    """
    problems = list(_misplaced(schedule))
    if problems:
        return tuple(problems)  # the rest would repeat them in other words
    problems = [*_miscounted(schedule), *_misordered(schedule)]
    if problems:
        return tuple(problems)
    return tuple(_circular_waits(schedule))


def _misplaced(schedule: Schedule) -> Iterator[str]:
    if not schedule.compute:
        yield "it has no ranks"
    if schedule.num_microbatches < 1:
        yield f"num_microbatches must be at least 1, not {schedule.num_microbatches}"
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.num_ranks:
            yield f"stage {stage} is on rank {rank}, but there are {schedule.num_ranks} ranks"
    for rank, actions in enumerate(schedule.compute):
        if rank not in schedule.stage_to_rank:
            yield f"rank {rank} has no stage"
        for action in actions:
            if not action.is_compute:
                yield f"rank {rank} has {action}: a schedule computes only; lower adds the rest"
            for part in action.compute_parts:
                yield from _misplaced_part(schedule, rank, part)


def _misplaced_part(schedule: Schedule, rank: int, part: Action) -> Iterator[str]:
    assert part.microbatch is not None
    if part.stage >= schedule.num_stages:
        yield f"rank {rank} runs {part}, but there are {schedule.num_stages} stages"
    elif schedule.stage_to_rank[part.stage] != rank:
        yield (
            f"rank {rank} runs {part}, but stage {part.stage} is on "
            f"rank {schedule.stage_to_rank[part.stage]}"
        )
    if part.microbatch >= schedule.num_microbatches:
        yield f"rank {rank} runs {part}, but there are {schedule.num_microbatches} microbatches"


def _miscounted(schedule: Schedule) -> Iterator[str]:
    kinds: dict[tuple[int, int | None], list[ActionKind]] = defaultdict(list)
    for actions in schedule.compute:
        for action in actions:
            for part in action.compute_parts:
                kinds[part.stage, part.microbatch].append(part.kind)
    needs_backward = not schedule.is_forward_only
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            counts = Counter(kinds[stage, microbatch])
            for kind, count in counts.items():
                if count > 1:
                    yield f"{Action(stage, kind, microbatch)} runs {count} times"
            if _F not in counts:
                yield f"{stage}F{microbatch} is missing"
            if needs_backward:
                yield from _wrong_backward(stage, microbatch, counts.keys() - {_F})


def _wrong_backward(stage: int, microbatch: int, kinds: set[ActionKind]) -> Iterator[str]:
    if not kinds:
        yield f"{stage}B{microbatch} is missing, or {stage}I{microbatch} and {stage}W{microbatch}"
    elif _B in kinds and len(kinds) > 1:
        others = " and ".join(str(Action(stage, kind, microbatch)) for kind in sorted(kinds - {_B}))
        yield f"{stage}B{microbatch} is the whole backward, so {others} must not run too"
    elif kinds == {_I}:
        yield f"{stage}W{microbatch} is missing, although {stage}I{microbatch} runs"
    elif kinds == {_W}:
        yield f"{stage}I{microbatch} is missing, although {stage}W{microbatch} runs"


def _misordered(schedule: Schedule) -> Iterator[str]:
    for rank, actions in enumerate(schedule.compute):
        position = {
            part: index for index, action in enumerate(actions) for part in action.compute_parts
        }
        for part, index in position.items():
            before = _BEFORE.get(part.kind)
            if before is None:
                continue
            earlier = Action(part.stage, before, part.microbatch)
            if position.get(earlier, -1) >= index:
                yield f"rank {rank} runs {part} before {earlier}, which it needs"


def _circular_waits(schedule: Schedule) -> Iterator[str]:
    times = compute_times(schedule.compute, num_stages=schedule.num_stages, costs=UNIT_COSTS)
    for rank, action, product in times.stuck:
        maker = "F" if product.direction == "forward" else "B or I"
        yield (
            f"rank {rank} waits forever at {action} for stage {product.stage}'s {maker} of "
            f"microbatch {product.microbatch}, on rank {schedule.stage_to_rank[product.stage]}"
        )
