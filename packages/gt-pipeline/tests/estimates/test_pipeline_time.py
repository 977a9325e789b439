"""Where the time of a step goes: the parts add up, and the bubble is the published one."""

from __future__ import annotations

import pytest
from schedule_cases import natural_schedule

from gt_pipeline.estimates import PipelineTime, pipeline_time
from gt_pipeline.schedules import SCHEDULE_NAMES, ActionCosts, lower


def time_of(
    name: str, ranks: int, microbatches: int, *, overlap_gathers: bool = True, **costs: float
) -> PipelineTime:
    schedule = natural_schedule(name, ranks, microbatches)
    lowered = lower(schedule, unshards=True, reduces=True)
    return pipeline_time(lowered, ActionCosts(**costs), overlap_gathers=overlap_gathers)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_the_bubble_of_1f1b_is_that_of_the_closed_formula(ranks: int, microbatches: int) -> None:
    time = time_of("1F1B", ranks, microbatches)
    assert time.bubble == (ranks - 1) * 3.0  # (p - 1)(F + B), with F 1 and B 2
    assert time.bubble / time.makespan == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert (time.transfers, time.gathers) == (0.0, 0.0)


def test_the_bubble_of_interleaved_1f1b_is_divided_by_the_stages_of_a_rank() -> None:
    # Each of the two stages of a rank computes as long as the one stage of 1F1B.
    assert time_of("Interleaved1F1B", 4, 8).bubble == (4 - 1) * 3.0
    assert time_of("Interleaved1F1B", 4, 8).actions == 2 * time_of("1F1B", 4, 8).actions


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("overlap_gathers", [False, True])
def test_parts_add_up(name: str, overlap_gathers: bool) -> None:
    time = time_of(
        name,
        4,
        8,
        overlap_gathers=overlap_gathers,
        transfer=0.25,
        unshard=0.5,
        reduce_grad=1.5,
    )
    parts = (time.actions, time.bubble, time.transfers, time.gathers)
    assert sum(parts) == pytest.approx(time.makespan)
    assert min(parts) >= 0


def test_gathers_that_block_cost_all_of_their_time() -> None:
    costs = {"unshard": 0.5, "reduce_grad": 1.5}
    # Every rank gathers before its first microbatch can come, and the first reduces last.
    assert time_of("1F1B", 4, 8, overlap_gathers=False, **costs).gathers == 2.0
    waits = time_of("Interleaved1F1B", 4, 8, overlap_gathers=False, **costs).gathers
    assert time_of("Interleaved1F1B", 4, 8, **costs).gathers < waits
