"""Schedules for tests: of any name and size that there is, and from a few lines of text."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from gt_pipeline.errors import ActionError
from gt_pipeline.schedules import SCHEDULE_NAMES, Action, Schedule, schedule_of
from gt_pipeline.schedules.actions import parse_action
from gt_pipeline.schedules.schedule_checks import schedule_problems

SLOW_MACHINES = settings(deadline=None, max_examples=30)
"""For tests that draw whole schedules: how long one takes says nothing."""

STAGES_PER_RANK = {
    "GPipe": [1],
    "1F1B": [1],
    "Interleaved1F1B": [1, 2, 3],
    "InterleavedZeroBubble": [1, 2, 3],
    "ZBVZeroBubble": [2],
    "DualPipeV": [2],
}


def natural_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Of a name, with two stages a rank where there can be two."""
    return schedule_of(
        name,
        num_ranks=num_ranks,
        num_stages=num_ranks * (2 if 2 in STAGES_PER_RANK[name] else 1),
        num_microbatches=num_microbatches,
    )


@st.composite
def named_schedules(draw: st.DrawFn, max_ranks: int = 5) -> Schedule:
    """Any schedule that has a name, in any small size that it can have."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = num_ranks * draw(st.sampled_from(STAGES_PER_RANK[name]))
    fewest = num_stages if name in ("1F1B", "DualPipeV") else 1
    num_microbatches = draw(st.integers(fewest, fewest + 3 * num_ranks))
    if name.startswith("Interleaved"):
        num_microbatches -= num_microbatches % max(1, num_microbatches // num_ranks)
    return schedule_of(
        name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """One that nobody would choose, and that can run: stages anywhere, actions in any order.

    Actions of all ranks are drawn one after another, each of those that could run next, so their
    order shows that no ranks wait in a circle. Then forwards and backwards that follow each other
    on a rank are run as one where that makes no such circle.
    """
    num_ranks = draw(st.integers(1, 3))
    stage_to_rank = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=num_ranks, max_size=5).filter(
            lambda ranks: set(ranks) == set(range(num_ranks))
        )
    )
    num_microbatches = draw(st.integers(1, 3))
    waiting = [
        Action(stage, kind, microbatch)
        for stage in range(len(stage_to_rank))
        for microbatch in range(num_microbatches)
        for kind in draw(st.sampled_from(_WAYS_TO_RUN))
    ]
    compute: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while waiting:
        ready = [each for each in waiting if _can_run(each, done, len(stage_to_rank))]
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        done.add(action)
        compute[stage_to_rank[action.stage]].append(action)
    schedule = Schedule(
        name="random",
        num_microbatches=num_microbatches,
        stage_to_rank=tuple(stage_to_rank),
        compute=tuple(tuple(actions) for actions in compute),
    )
    return _with_overlaps(schedule)


def any_schedules(max_ranks: int = 5) -> st.SearchStrategy[Schedule]:
    """With a name or without."""
    return st.one_of(named_schedules(max_ranks), random_schedules())


_WAYS_TO_RUN = (
    ("FORWARD", "FULL_BACKWARD"),
    ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"),
)


def _can_run(action: Action, done: set[Action], num_stages: int) -> bool:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "FORWARD":
        return stage == 0 or Action(stage - 1, "FORWARD", microbatch) in done
    if action.kind == "BACKWARD_WEIGHT":
        return Action(stage, "BACKWARD_INPUT", microbatch) in done
    is_there = stage == num_stages - 1 or any(
        Action(stage + 1, kind, microbatch) in done for kind in ("FULL_BACKWARD", "BACKWARD_INPUT")
    )
    return is_there and Action(stage, "FORWARD", microbatch) in done


def _with_overlaps(schedule: Schedule) -> Schedule:
    for rank in range(schedule.num_ranks):
        place = 0
        while place + 1 < len(schedule.compute[rank]):
            actions = list(schedule.compute[rank])
            try:
                actions[place : place + 2] = [Action.overlap(*actions[place : place + 2])]
            except ActionError:
                place += 1
                continue
            rows = [*schedule.compute]
            rows[rank] = tuple(actions)
            merged = replace(schedule, compute=tuple(rows))
            if not schedule_problems(merged):
                schedule = merged
            place += 1
    return schedule


def schedule_of_text(
    *ranks: str, stage_to_rank: tuple[int, ...], num_microbatches: int = 1
) -> Schedule:
    """One that nobody has checked, from the actions of each rank."""
    return Schedule(
        name="by hand",
        num_microbatches=num_microbatches,
        stage_to_rank=stage_to_rank,
        compute=tuple(tuple(parse_action(text) for text in rank.split()) for rank in ranks),
    )


def text_of(rows: tuple[tuple[object, ...], ...]) -> str:
    """One line for each rank."""
    return "\n".join(" ".join(map(str, row)) for row in rows)
