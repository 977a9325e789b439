"""When everything in a schedule runs, at given costs: makespan, idle time, live chunks.

How lists run, and what overlaps what, is told in ``rank_lists``.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.costs import UNIT_COSTS, CostModel
from gt_pipeline.schedules.liveness import peak_live
from gt_pipeline.schedules.lowering import lower
from gt_pipeline.schedules.rank_lists import RankLists, Span
from gt_pipeline.schedules.schedule import LoweredSchedule, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimeline:
    """A simulated run of a schedule; times in the unit of the costs."""

    schedule: Schedule
    makespan: float
    """When the last action of any rank ends; the first starts at 0."""

    compute: tuple[float, ...]
    """How long each rank computes."""

    idle: tuple[float, ...]
    """How long each rank does not compute while any rank does something: ``makespan - compute``."""

    idle_within_span: tuple[float, ...]
    """How long each rank does not compute between the start of its first computation and the end of
    its last."""

    peak_live: tuple[int, ...]
    """The most chunks that each rank holds at once; see ``peak_live``."""

    spans: tuple[Span, ...]
    """When every action runs, rank by rank in the order of its list. A RESHARD takes no time."""

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they do not compute, from 0 to 1."""
        total = self.makespan * len(self.compute)
        return sum(self.idle) / total if total else 0.0


def simulate(
    schedule: Schedule | LoweredSchedule,
    costs: CostModel = UNIT_COSTS,
    *,
    overlap_communication: bool = True,
    overlap_gathers: bool = True,
) -> ScheduleTimeline:
    """Run a schedule on paper.

    Args:
        schedule: a lowered one, or one that is lowered at these costs, without UNSHARD and
            REDUCE_GRAD.
        costs: how long each action takes. Of a transfer, the cost of its SEND counts.
        overlap_communication: whether ranks compute while they communicate.
        overlap_gathers: whether that goes for UNSHARD and REDUCE_GRAD too, as stages of graphs run
            them: launched, and waited for by what needs them. PyTorch's stages wait at once.

    Raises:
        ScheduleError: the ranks would wait for each other forever; says where each of them stands.
    """
    if isinstance(schedule, Schedule):
        schedule = lower(schedule, unshards=False, reduces=False, costs=costs)
    lists = RankLists(
        schedule.schedule.stage_to_rank,
        schedule.actions,
        costs,
        blocking_transfers=not overlap_communication,
        blocking_gathers=not (overlap_communication and overlap_gathers),
    )
    stuck = lists.run()
    if stuck:
        raise ScheduleError(
            what=f"{schedule.schedule.name}: ranks wait for each other forever", problems=stuck
        )
    spans_of_ranks = lists.spans_by_rank()
    spans = tuple(span for each in spans_of_ranks for span in each)
    makespan = max((span.end for span in spans), default=0.0)
    by_rank = [[span for span in each if span.lane == "compute"] for each in spans_of_ranks]
    compute = tuple(sum(span.duration for span in each) for each in by_rank)
    return ScheduleTimeline(
        schedule=schedule.schedule,
        makespan=makespan,
        compute=compute,
        idle=tuple(makespan - each for each in compute),
        idle_within_span=tuple(
            each[-1].end - each[0].start - busy if each else 0.0
            for each, busy in zip(by_rank, compute, strict=True)
        ),
        peak_live=peak_live(schedule.schedule),
        spans=spans,
    )
