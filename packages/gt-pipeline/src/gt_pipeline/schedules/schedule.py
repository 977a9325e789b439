"""A pipeline schedule as data: which rank computes what, in which order.

It holds no stages, no process group and nothing of PyTorch, so that a schedule can be planned,
checked, simulated and drawn on any machine. What moves data between ranks is added by ``lower``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.schedule_rules import ScheduleStyle

StageStyle = Literal[ScheduleStyle, "explicit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Compute actions by rank, in the order in which each rank runs them.

    Building one checks nothing: ``check_schedule`` does, and so does everything in this package
    that makes or lowers one.
    """

    name: str
    """Of the schedule as PyTorch spells it, or the name of the file that it was read from."""

    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    """The rank that holds each virtual stage; its length is the number of stages."""

    compute: tuple[tuple[Action, ...], ...]
    """By rank. Bubbles are not actions: a rank waits for what an action needs, and no longer."""

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.compute)

    @property
    def num_stages(self) -> int:
        """How many virtual stages all ranks hold together."""
        return len(self.stage_to_rank)

    @property
    def style(self) -> StageStyle:
        """How stages lie on ranks: in a loop (0 1 2 3 0 1 2 3), a V (0 1 2 3 3 2 1 0) or else."""
        if self.stage_to_rank == _loop(self.num_ranks, self.num_stages):
            return "loop"
        if self.stage_to_rank == _v(self.num_ranks, self.num_stages):
            return "v"
        return "explicit"

    @property
    def is_forward_only(self) -> bool:
        """Whether it has no backward at all, as for evaluation."""
        return all(
            part.kind == "FORWARD"
            for actions in self.compute
            for action in actions
            for part in action.compute_parts
        )

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Indices of the stages that a rank holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredSchedule:
    """Everything that each rank does, in the order in which it does it."""

    schedule: Schedule
    """What is computed: without the other actions, ``actions`` is ``schedule.compute``."""

    actions: tuple[tuple[Action, ...], ...]
    """By rank."""

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.actions)


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards, as evaluation runs it.

    Forwards keep their order, so what was free of deadlock stays free of it.
    """
    return replace(
        schedule,
        compute=tuple(
            tuple(
                part
                for action in actions
                for part in action.compute_parts
                if part.kind == "FORWARD"
            )
            for actions in schedule.compute
        ),
    )


def _loop(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    return tuple(stage % num_ranks for stage in range(num_stages))


def _v(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
    return tuple(there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages))
