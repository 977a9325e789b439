"""How many chunks are live at once: the published numbers, and what counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from schedule_cases import (
    SLOW_MACHINES,
    any_schedules,
    natural_schedule,
    schedule_of_text,
)

from gt_pipeline.schedules import Schedule, peak_live, simulate
from gt_pipeline.schedules.schedule import forward_only


@pytest.mark.parametrize(("num_ranks", "column"), [(4, 0), (8, 1)])
@pytest.mark.parametrize(
    ("name", "published"),
    [("Interleaved1F1B", (11, 23)), ("ZBVZeroBubble", (8, 16)), ("DualPipeV", (9, 17))],
)
@pytest.mark.parametrize("microbatches_per_rank", [2, 4])
def test_the_busiest_rank_holds_the_published_number_of_chunks(
    name: str, published: tuple[int, int], num_ranks: int, column: int, microbatches_per_rank: int
) -> None:
    schedule = natural_schedule(name, num_ranks, microbatches_per_rank * num_ranks)
    assert max(peak_live(schedule)) == published[column]


def test_gpipe_holds_every_microbatch_and_1f1b_one_for_each_stage_that_follows() -> None:
    assert peak_live(natural_schedule("GPipe", 4, 8)) == (8, 8, 8, 8)
    assert peak_live(natural_schedule("1F1B", 4, 8)) == (4, 3, 2, 1)


def test_a_chunk_lives_until_its_weight_gradients_are_there() -> None:
    split = schedule_of_text("0F0 0I0 0F1 0I1 0W0 0W1", stage_to_rank=(0,), num_microbatches=2)
    whole = schedule_of_text("0F0 0B0 0F1 0B1", stage_to_rank=(0,), num_microbatches=2)
    assert peak_live(split) == (2,)
    assert peak_live(whole) == (1,)


def test_what_overlaps_is_live_together() -> None:
    schedule = schedule_of_text(
        "0F0 (0F1;0B0)OVERLAP_F_B 0B1", stage_to_rank=(0,), num_microbatches=2
    )
    assert peak_live(schedule) == (2,)


@SLOW_MACHINES
@given(any_schedules())
def test_evaluation_saves_nothing(schedule: Schedule) -> None:
    assert set(peak_live(forward_only(schedule))) == {0}


@SLOW_MACHINES
@given(any_schedules())
def test_the_simulator_counts_the_same(schedule: Schedule) -> None:
    assert simulate(schedule).peak_live == peak_live(schedule)
