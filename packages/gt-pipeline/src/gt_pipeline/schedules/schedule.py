"""A pipeline schedule as data: which rank computes what, in which order.

It holds no stages, no process group and nothing of PyTorch, so that a schedule can be planned,
checked, simulated and drawn on any machine. What moves data between ranks is added by ``lower``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gt_pipeline.schedules.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Compute actions by rank, in the order in which each rank runs them.

    Building one checks nothing: ``check_schedule`` does, and so does everything in this package
    that makes or lowers one.
    """

    name: str
    """How PyTorch spells the schedule, or the name of the file that it was read from."""

    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    """The rank that holds each virtual stage; its length is the number of stages."""

    compute: tuple[tuple[Action, ...], ...]
    """The actions of each rank, in order. Bubbles are not actions: a rank waits for what an action
    needs, and no longer."""

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.compute)

    @property
    def num_stages(self) -> int:
        """How many virtual stages all ranks hold together."""
        return len(self.stage_to_rank)

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
    """The schedule that was lowered: ``actions`` without what lowering added is its ``compute``."""

    actions: tuple[tuple[Action, ...], ...]
    """The actions of each rank, in order."""

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
