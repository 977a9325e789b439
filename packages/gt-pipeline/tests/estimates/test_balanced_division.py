"""Units are divided so that the simulated schedule is short; never longer than what it began with."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt_pipeline.errors import ScheduleError, StageLayoutError
from gt_pipeline.estimates import (
    PipelineUnits,
    UnitTimes,
    balanced_division,
)
from gt_pipeline.estimates.balanced_division import BalancedDivision
from gt_pipeline.schedules import Action, Schedule, lower, schedule_of, simulate


def unit(time: float, *, kind: int = 0) -> UnitTimes:
    """Forward, dI and dW take the same."""
    return UnitTimes(
        actions={
            "FORWARD": time,
            "FULL_BACKWARD": 2 * time,
            "BACKWARD_INPUT": time,
            "BACKWARD_WEIGHT": time,
        },
        kind=kind,
    )


def units(*times: float) -> PipelineUnits:
    return PipelineUnits(times=tuple(map(unit, times)))


def lowered(schedule: Schedule):
    return lambda counts: lower(schedule, unshards=False, reduces=False)


def divide(model: PipelineUnits, schedule: Schedule, before: tuple[int, ...]) -> BalancedDivision:
    return balanced_division(model, schedule, before=before, lowered=lowered(schedule))


def test_the_largest_stage_is_as_small_as_it_can_be():
    schedule = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=8)
    found = divide(units(0, 1, 1, 1, 1, 1, 1, 2), schedule, (4, 4))
    assert found.counts == (5, 3)
    # (p - 1 + m) of 3 x 4, where the last of 5 was the pace.
    assert found.makespan == pytest.approx(12 * 9)
    assert found.makespan_before > found.makespan


def test_an_even_model_stays_as_it_is():
    schedule = schedule_of("1F1B", num_ranks=4, num_stages=4, num_microbatches=8)
    found = divide(units(*[1] * 8), schedule, (2, 2, 2, 2))
    assert found.counts == (2, 2, 2, 2)
    assert found.makespan == found.makespan_before


def test_where_a_rank_has_several_stages_their_sum_sets_the_pace():
    """The last unit is as long as three, and shares its rank with the first stage."""
    schedule = schedule_of("ZBVZeroBubble", num_ranks=2, num_stages=4, num_microbatches=8)
    assert schedule.stage_to_rank == (0, 1, 1, 0)
    found = divide(units(0, *[1] * 9, 3), schedule, (3, 3, 3, 2))
    assert sum(found.counts) == 11
    sums = [0.0, 0.0]
    times = [0, *[1] * 9, 3]
    for stage, end in enumerate(itertools.accumulate(found.counts)):
        sums[schedule.stage_to_rank[stage]] += sum(times[end - found.counts[stage] : end])
    assert sums == [6, 6]
    assert found.makespan < found.makespan_before


@settings(max_examples=30, deadline=None)
@given(
    times=st.lists(st.integers(0, 9), min_size=5, max_size=8),
    name=st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
    data=st.data(),
)
def test_it_is_never_slower_than_before_and_close_to_the_best(times, name, data):
    stages = 2 if name == "1F1B" else 4
    schedule = schedule_of(name, num_ranks=2, num_stages=stages, num_microbatches=4)
    model = units(*map(float, times))
    every = [
        tuple(end - begin for begin, end in itertools.pairwise((0, *ends, len(times))))
        for ends in itertools.combinations(range(1, len(times)), stages - 1)
    ]
    before = data.draw(st.sampled_from(every))
    found = divide(model, schedule, before)
    assert found == divide(model, schedule, before)
    assert found.counts in every

    def makespan(counts):
        return simulate(lowered(schedule)(counts), model.costs(counts)).makespan

    assert found.makespan == makespan(found.counts)
    assert found.makespan <= found.makespan_before == makespan(before)
    best = min(map(makespan, every))
    assert found.makespan <= best * 1.35 + 1e-9
    if name == "1F1B":
        assert found.makespan <= best * 1.1 + 1e-9


def test_costs_of_a_stage_are_the_sums_of_its_units():
    costs = units(1, 2, 3).costs((2, 1))
    assert costs(Action(0, "FORWARD", 0)) == 3
    assert costs(Action(1, "BACKWARD_INPUT", 0)) == 3
    assert costs(Action(1, "RESHARD")) == 0
    assert costs(Action(1, "UNSHARD")) == 0


def test_all_of_the_first_stages_backward_is_dw():
    costs = units(1, 2, 3).costs((2, 1))
    assert costs(Action(0, "BACKWARD_INPUT", 0)) == 0
    assert costs(Action(0, "BACKWARD_WEIGHT", 0)) == 6


def test_a_pair_saves_what_its_layers_hide_side_by_side():
    model = PipelineUnits(
        times=(unit(1, kind=0), unit(4, kind=1), unit(4, kind=1), unit(4, kind=1)),
        saved={(1, 1, "FULL_BACKWARD"): 2.0},
    )
    costs = model.costs((2, 2))
    parts = Action(0, "FORWARD", 0), Action(1, "FULL_BACKWARD", 1)
    # 5 and 16; of the two units of each lane, the embedding hides nothing.
    assert costs(Action.overlap(*parts)) == 5 + 16 - 2
    other = Action(0, "FORWARD", 0), Action(1, "BACKWARD_INPUT", 1)
    assert costs(Action.overlap(*other)) == 5 + 8


def test_a_pair_takes_no_less_than_either_part():
    model = PipelineUnits(times=(unit(1), unit(1)), saved={(0, 0, "FULL_BACKWARD"): 5.0})
    parts = Action(0, "FORWARD", 0), Action(1, "FULL_BACKWARD", 1)
    assert model.costs((1, 1))(Action.overlap(*parts)) == 2


def test_a_division_whose_schedule_cannot_run_is_none():
    schedule = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=4)

    def only_even(counts):
        if counts != (2, 2):
            raise ScheduleError(what="too much is gathered", problems=["by far"])
        return lower(schedule, unshards=False, reduces=False)

    model = units(1, 1, 1, 5)
    found = balanced_division(model, schedule, before=(2, 2), lowered=only_even)
    assert found.counts == (2, 2)
    assert math.isfinite(found.makespan)
    with pytest.raises(ScheduleError, match="too much is gathered"):
        balanced_division(model, schedule, before=(3, 1), lowered=only_even)


def test_refuses_more_stages_than_units():
    schedule = schedule_of("1F1B", num_ranks=4, num_stages=4, num_microbatches=4)
    with pytest.raises(StageLayoutError, match="at most 3 stages"):
        divide(units(1, 1, 1), schedule, (1, 1, 1, 0))
