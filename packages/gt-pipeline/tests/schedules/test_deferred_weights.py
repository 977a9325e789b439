"""Fewer dW put off: less is held, bits stay, and nothing else of the schedule changes."""

from __future__ import annotations

import pytest
from schedule_cases import natural_schedule, schedule_of_text

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import ActionCosts, limit_deferred_weights, lower, schedule_of, simulate
from gt_pipeline.schedules.deferred_weights import max_deferred_weights
from gt_pipeline.schedules.schedule import Schedule


def of_one_rank(text: str, *, num_microbatches: int) -> Schedule:
    return schedule_of_text(text, stage_to_rank=(0,), num_microbatches=num_microbatches)


def text_of(schedule: Schedule) -> str:
    return " ".join(str(action) for action in schedule.compute[0])


def test_the_oldest_runs_before_one_more_is_put_off() -> None:
    schedule = of_one_rank("0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3 0W0 0W1 0W2 0W3", num_microbatches=4)
    assert max_deferred_weights(schedule) == 4
    limited = limit_deferred_weights(schedule, 2)
    assert text_of(limited) == "0F0 0F1 0F2 0F3 0I0 0I1 0W0 0I2 0W1 0I3 0W2 0W3"
    assert limit_deferred_weights(schedule, 4) == schedule


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 12), (8, 24)])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_schedules_by_name_can_be_limited(
    name: str, ranks: int, microbatches: int, limit: int
) -> None:
    schedule = natural_schedule(name, ranks, microbatches)
    limited = limit_deferred_weights(schedule, limit)
    assert max_deferred_weights(limited) <= limit
    for before, after in zip(schedule.compute, limited.compute, strict=True):
        assert sorted(map(str, before)) == sorted(map(str, after))
    simulate(lower(limited, unshards=True, reduces=True))  # raises where ranks are stuck


def test_what_is_not_put_off_fills_no_bubble() -> None:
    schedule = schedule_of("DualPipeV", num_ranks=4, num_stages=8, num_microbatches=16)
    costs = ActionCosts(overlap_f_b=3.0)
    spans = [
        simulate(each, costs).makespan for each in (schedule, limit_deferred_weights(schedule, 1))
    ]
    assert spans[0] <= spans[1]


def test_schedules_without_dw_stay_as_they_are() -> None:
    schedule = natural_schedule("1F1B", 4, 8)
    assert max_deferred_weights(schedule) == 0
    assert limit_deferred_weights(schedule, 1) == schedule


def test_no_limit_below_one() -> None:
    with pytest.raises(ScheduleError) as error:
        limit_deferred_weights(natural_schedule("DualPipeV", 2, 4), 0)
    assert str(error.value) == (
        "max_deferred is 0:\n"
        "  - a dW runs behind its dI, so one is always put off: allowed is 1 or more"
    )


def test_gradients_are_not_added_in_another_order() -> None:
    schedule = of_one_rank("0F0 0F1 0F2 0I1 0I2 0B0 0W2 0W1", num_microbatches=3)
    with pytest.raises(ScheduleError) as error:
        limit_deferred_weights(schedule, 1)
    assert str(error.value) == (
        "by hand cannot put off at most 1 dW:\n"
        "  - rank 0 would add gradients of stage 0 in another order"
    )
    assert limit_deferred_weights(schedule, 2) == schedule
