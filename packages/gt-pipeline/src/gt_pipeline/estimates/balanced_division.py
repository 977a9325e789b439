"""Which part of a model goes to which stage, so that the simulated schedule is as short as can be.

A model is a row of *units* that are not divided further: what stands before the layers, each layer,
what stands after them. A stage is a stretch of the row, and what an action of it takes is what that
action takes of its units. That is exact but for what a graph of several units launches once, or
hides behind one another, so that a division costs a simulation and no capture.

The largest stage sets the pace where each rank has one; where it has several, their sum does, and
which of them is large still counts at both ends of the schedule. So candidates are made by sums,
of stages (the linear partition problem) and of ranks, and the simulation decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from gt_config.node_keys import PipelineAction
from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import Action, simulate
from gt_pipeline.schedules.schedule import LoweredSchedule, Schedule
from gt_pipeline.split import module_names_by_cost

_MOST_STEPS = 40
"""Divisions beside the best one that are simulated at most."""

_GAIN = 1 - 1e-9
"""What is shorter by less is equal but for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """How long the actions of a stage of this unit alone take, in any one unit of time."""

    actions: Mapping[PipelineAction, float]
    """UNSHARD and REDUCE_GRAD too; what is missing takes no time."""

    kind: int = 0
    """Equal for units that are alike."""

    @property
    def compute(self) -> float:
        """Forward and backward of one microbatch."""
        return self.actions.get("FORWARD", 0.0) + self.actions.get("FULL_BACKWARD", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUnits:
    """All that a division of a model is priced by."""

    times: tuple[UnitTimes, ...]
    """Of each unit, in the order in which the model runs them."""

    transfer: Callable[[Action], float] = lambda action: 0.0
    """What a SEND or RECV takes."""

    saved: Mapping[tuple[int, int, PipelineAction], float] = field(default_factory=dict)
    """How much less a forward and a backward take as one action than one after the other: by the
    kinds of their units, and the kind of the backward. What is missing saves nothing."""

    def costs(self, counts: Sequence[int]) -> Callable[[Action], float]:
        """What each action takes of stages of so many units."""
        return _DividedCosts(self, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedDivision:
    """How units are divided, and what that gains; times are those of one run of the schedule."""

    counts: tuple[int, ...]
    """Units of each stage."""

    makespan: float
    makespan_before: float
    """Of the division that it was compared with, and is never longer than."""


def balanced_division(
    units: PipelineUnits,
    schedule: Schedule,
    *,
    before: Sequence[int],
    lowered: Callable[[Sequence[int]], LoweredSchedule],
    fits: Callable[[Sequence[int]], bool] = lambda counts: True,
    overlap_gathers: bool = True,
) -> BalancedDivision:
    """Divide units among the stages of a schedule; the same result for the same numbers.

    Args:
        units: at least as many as the schedule has stages.
        schedule: of the whole pipeline.
        before: units of each stage in the division to compare with, at least one each.
        lowered: the schedule as it runs with so many units in each stage; a ``ScheduleError`` rules
            a division out.
        fits: whether ranks have the memory for so many units in each stage; what does not fit is
            not chosen.
        overlap_gathers: as for ``simulate``.

    Raises:
        StageLayoutError: as ``module_names_by_cost``.
        ScheduleError: the schedule cannot run with the division to compare with.
    """

    def simulated(counts: tuple[int, ...]) -> float:
        costs = units.costs(counts)
        return simulate(lowered(counts), costs, overlap_gathers=overlap_gathers).makespan

    def makespan(counts: tuple[int, ...]) -> float:
        if counts not in known:
            try:
                known[counts] = simulated(counts)
            except ScheduleError:
                known[counts] = math.inf
        return known[counts]

    def is_better(counts: tuple[int, ...], than: tuple[int, ...]) -> bool:
        return makespan(counts) < makespan(than) * _GAIN and fits(counts)

    start = tuple(before)
    known = {start: simulated(start)}
    loads = _Loads(units, schedule)
    by_stage = tuple(
        len(stage)
        for stage in module_names_by_cost(
            {str(index): each.compute for index, each in enumerate(units.times)},
            num_stages=schedule.num_stages,
        )
    )
    best = start
    for found in (by_stage, loads.settled(start), loads.settled(by_stage)):
        if is_better(found, best):
            best = found
    most = len(known) + _MOST_STEPS
    while len(known) < most:
        nearby = sorted(_moves(best), key=loads.order)
        better = (
            each
            for each in nearby[: 2 * schedule.num_ranks]
            if len(known) < most and is_better(each, best)
        )
        step = next(better, None)
        if step is None:
            break
        best = step
    return BalancedDivision(counts=best, makespan=makespan(best), makespan_before=makespan(start))


class _DividedCosts:
    """The sum over a stage's units, for each action."""

    def __init__(self, units: PipelineUnits, counts: Sequence[int]) -> None:
        self._units = units
        ends = list(itertools.accumulate(counts))
        self._stages = [
            units.times[end - count : end] for end, count in zip(ends, counts, strict=True)
        ]
        self._known: dict[tuple[object, ...], float] = {}

    def __call__(self, action: Action) -> float:
        if action.kind == "RESHARD":
            return 0.0
        if action.is_point_to_point:
            return self._units.transfer(action)
        if action.parts is None:
            return self._alone(action.stage, cast("PipelineAction", action.kind))
        forward, backward = action.parts
        key = (forward.stage, backward.stage, backward.kind)
        if key not in self._known:
            kind = cast("PipelineAction", backward.kind)
            self._known[key] = self._pair(forward.stage, backward.stage, kind)
        return self._known[key]

    def _alone(self, stage: int, kind: PipelineAction) -> float:
        key = (stage, kind)
        if key not in self._known:
            self._known[key] = sum(self._of_unit(stage, each, kind) for each in self._stages[stage])
        return self._known[key]

    @staticmethod
    def _of_unit(stage: int, unit: UnitTimes, kind: PipelineAction) -> float:
        # Nothing enters the first stage that has a gradient: all of its backward is dW.
        if stage == 0 and kind == "BACKWARD_INPUT":
            return 0.0
        if stage == 0 and kind == "BACKWARD_WEIGHT":
            kind = "FULL_BACKWARD"
        return unit.actions.get(kind, 0.0)

    def _pair(self, forward: int, backward: int, kind: PipelineAction) -> float:
        """Units of both lanes run side by side, the backward's from the last."""
        alone = self._alone(forward, "FORWARD"), self._alone(backward, kind)
        saved = sum(
            self._units.saved.get((one.kind, other.kind, kind), 0.0)
            for one, other in zip(
                self._stages[forward], reversed(self._stages[backward]), strict=False
            )
        )
        return max(*alone, sum(alone) - saved)


class _Loads:
    """How even a division is, without a simulation."""

    def __init__(self, units: PipelineUnits, schedule: Schedule) -> None:
        self._before = [0.0, *itertools.accumulate(each.compute for each in units.times)]
        self._rank_of = schedule.stage_to_rank
        self._num_ranks = schedule.num_ranks

    def order(self, counts: tuple[int, ...]) -> tuple[float, float, float, tuple[int, ...]]:
        """The largest rank, how uneven ranks are, the largest stage, and what makes it definite."""
        of_rank = [0.0] * self._num_ranks
        largest, begin = 0.0, 0
        for stage, count in enumerate(counts):
            load = self._before[begin + count] - self._before[begin]
            of_rank[self._rank_of[stage]] += load
            largest, begin = max(largest, load), begin + count
        return max(of_rank), sum(load * load for load in of_rank), largest, counts

    def settled(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Where moving one unit from a stage to another makes nothing more even."""
        while True:
            better = min(_moves(counts), key=self.order, default=counts)
            if self.order(better) >= self.order(counts):
                return counts
            counts = better


def _moves(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One unit less in one stage, one more in another; stages between them move along."""
    for giver, taker in itertools.permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            moved = list(counts)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)
