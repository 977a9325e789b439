"""Where the time of a pipeline's step goes, so that the parts add up to the whole.

Parts are means over ranks. What a rank's actions take is known from their graphs. What the schedule
adds is told apart by simulating it again: without transfers, and without gathers too. What is left
then beyond the actions is the bubble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gt_pipeline.schedules import Action, ScheduleTimeline, simulate
from gt_pipeline.schedules.schedule import LoweredSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTime:
    """A simulated schedule, and what its time is spent on; in the unit of the costs.

    ``makespan`` is the sum of ``actions``, ``bubble``, ``transfers`` and ``gathers``.
    """

    timeline: ScheduleTimeline
    actions: float
    """The mean over ranks of what their computations take."""

    bubble: float
    """How long ranks wait for one another, on average, where communication takes no time."""

    transfers: float
    """How much longer the schedule takes because transfers take time."""

    gathers: float
    """How much longer it takes because UNSHARD and REDUCE_GRAD do."""

    @property
    def makespan(self) -> float:
        """From the first action of any rank to the end of the last."""
        return self.timeline.makespan


def pipeline_time(
    lowered: LoweredSchedule,
    costs: Callable[[Action], float],
    *,
    overlap_gathers: bool = True,
) -> PipelineTime:
    """Simulate a schedule and take its time apart.

    Args:
        lowered: the schedule as it runs.
        costs: how long each action takes.
        overlap_gathers: as for ``simulate``.
    """

    def without(*, transfers: bool, gathers: bool) -> Callable[[Action], float]:
        def cost(action: Action) -> float:
            is_free = (transfers and action.is_point_to_point) or (
                gathers and not action.is_point_to_point and not action.is_compute
            )
            return 0.0 if is_free else costs(action)

        return cost

    timeline = simulate(lowered, costs, overlap_gathers=overlap_gathers)
    no_transfers = simulate(
        lowered, without(transfers=True, gathers=False), overlap_gathers=overlap_gathers
    ).makespan
    alone = simulate(lowered, without(transfers=True, gathers=True)).makespan
    actions = sum(timeline.compute) / len(timeline.compute)
    return PipelineTime(
        timeline=timeline,
        actions=actions,
        bubble=alone - actions,
        transfers=timeline.makespan - no_transfers,
        gathers=no_transfers - alone,
    )
