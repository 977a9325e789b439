"""The schedules that have a name, for any sizes, without stages or a process group.

Multi-stage tables come from PyTorch's schedule classes, so that a graph pipeline runs exactly what
an eager one does. GPipe and 1F1B are written here: PyTorch runs them by code, and its printed 1F1B
table is not what that code does (2.13 to 2.15 skip microbatch 0's forward on the last rank and
name one that does not exist).
"""

from __future__ import annotations

from gt_pipeline._torch_internals import torch_table
from gt_pipeline.schedules.actions import Action, parse_action
from gt_pipeline.schedules.schedule import Schedule
from gt_pipeline.schedules.schedule_checks import check_schedule
from gt_pipeline.schedules.schedule_rules import check_sizes


def schedule_of(name: str, *, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    """A schedule by name, checked.

    Args:
        name: one of ``SCHEDULE_NAMES``, in any case.
        num_ranks: pipeline degree.
        num_stages: virtual stages of all ranks together.
        num_microbatches: that one step runs.

    Raises:
        ScheduleError: unknown name, or sizes that it cannot have; lists every violation.
    """
    rules = check_sizes(
        name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )
    if rules.stages_per_rank == 1:
        num_warmups = {
            "GPipe": [num_microbatches] * num_ranks,
            "1F1B": [num_ranks - rank for rank in range(num_ranks)],
        }[rules.name]
        compute = tuple(
            _forwards_then_pairs(rank, num_microbatches, num_warmup)
            for rank, num_warmup in enumerate(num_warmups)
        )
        stage_to_rank = tuple(range(num_ranks))
    else:
        table, stage_to_rank = torch_table(
            rules.name,
            num_ranks=num_ranks,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
        )
        compute = tuple(tuple(parse_action(text) for text in row) for row in table)
    schedule = Schedule(
        name=rules.name,
        num_microbatches=num_microbatches,
        stage_to_rank=stage_to_rank,
        compute=compute,
    )
    check_schedule(schedule)
    return schedule


def _forwards_then_pairs(stage: int, num_microbatches: int, num_warmup: int) -> tuple[Action, ...]:
    """``num_warmup`` forwards, then a backward and a forward in turn, then the other backwards."""
    forwards = [Action(stage, "FORWARD", each) for each in range(num_microbatches)]
    actions = forwards[:num_warmup]
    for microbatch in range(num_microbatches):
        actions.append(Action(stage, "FULL_BACKWARD", microbatch))
        actions.extend(forwards[num_warmup + microbatch : num_warmup + microbatch + 1])
    return tuple(actions)
