"""What is wrong with a schedule: everything, at once, and by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_cases import SLOW_MACHINES, any_schedules, schedule_of_text

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import Schedule, check_schedule
from gt_pipeline.schedules.schedule_checks import schedule_problems


def _problems(*ranks: str, stage_to_rank: tuple[int, ...], num_microbatches: int = 1) -> str:
    schedule = schedule_of_text(
        *ranks, stage_to_rank=stage_to_rank, num_microbatches=num_microbatches
    )
    return "\n".join(schedule_problems(schedule))


def test_a_right_schedule_has_no_problem() -> None:
    assert _problems("0F0 0B0", "1F0 1I0 1W0", stage_to_rank=(0, 1)) == ""


def test_a_schedule_without_backward_is_one_for_evaluation() -> None:
    assert _problems("0F0", "1F0", stage_to_rank=(0, 1)) == ""


def test_a_schedule_without_ranks_is_reported() -> None:
    assert _problems(stage_to_rank=()) == "it has no ranks"


def test_what_does_not_belong_on_a_rank_is_reported() -> None:
    assert_expected_inline(
        _problems("0F0 0SEND_F0 1F0", "2F0 0F7", "1F1", stage_to_rank=(0, 1, 9)),
        """\
stage 2 is on rank 9, but there are 3 ranks
rank 0 has 0SEND_F0: a schedule computes only; lower adds the rest
rank 0 runs 1F0, but stage 1 is on rank 1
rank 1 runs 2F0, but stage 2 is on rank 9
rank 1 runs 0F7, but stage 0 is on rank 0
rank 1 runs 0F7, but there are 1 microbatches
rank 2 has no stage
rank 2 runs 1F1, but stage 1 is on rank 1
rank 2 runs 1F1, but there are 1 microbatches""",
    )


def test_what_is_missing_double_or_mixed_is_reported() -> None:
    assert_expected_inline(
        _problems(
            "0F0 0F0 0B0 0I0 0F1 0I1 0F2 0W2 0B3",
            stage_to_rank=(0,),
            num_microbatches=5,
        ),
        """\
0F0 runs 2 times
0B0 is the whole backward, so 0I0 must not run too
0W1 is missing, although 0I1 runs
0I2 is missing, although 0W2 runs
0F3 is missing
0F4 is missing
0B4 is missing, or 0I4 and 0W4""",
    )


def test_what_stands_before_what_it_needs_is_reported() -> None:
    assert_expected_inline(
        _problems("0B0 0F0 0F1 0W1 0I1", stage_to_rank=(0,), num_microbatches=2),
        """\
rank 0 runs 0B0 before 0F0, which it needs
rank 0 runs 0W1 before 0I1, which it needs""",
    )


def test_ranks_that_wait_for_each_other_are_reported() -> None:
    assert_expected_inline(
        _problems(
            "0F0 3F1 3B1 0F1 0B0 0B1 3F0 3B0",
            "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1",
            stage_to_rank=(0, 1, 1, 0),
            num_microbatches=2,
        ),
        """\
rank 0 waits forever at 3F1 for stage 2's F of microbatch 1, on rank 1
rank 1 waits forever at 1F1 for stage 0's F of microbatch 1, on rank 0""",
    )


def test_an_overlap_waits_for_both_of_its_parts() -> None:
    """Its backward needs what rank 1 makes only after the overlap's own forward."""
    assert_expected_inline(
        _problems(
            "0F0 (0F1;0B0)OVERLAP_F_B 0B1",
            "1F0 1F1 1B0 1B1",
            stage_to_rank=(0, 1),
            num_microbatches=2,
        ),
        """\
rank 0 waits forever at (0F1;0B0)OVERLAP_F_B for stage 1's B or I of microbatch 0, on rank 1
rank 1 waits forever at 1F1 for stage 0's F of microbatch 1, on rank 0""",
    )


def test_check_schedule_raises_all_of_it() -> None:
    schedule = schedule_of_text("0F0 0B0 0B0", "1F0", stage_to_rank=(0, 1))
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    assert_expected_inline(
        str(caught.value),
        """\
the schedule by hand cannot run:
  - 0B0 runs 2 times
  - 1B0 is missing, or 1I0 and 1W0""",
    )


@SLOW_MACHINES
@given(any_schedules(max_ranks=3), st.data())
def test_a_schedule_that_lacks_an_action_is_refused(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    place = data.draw(st.integers(0, len(schedule.compute[rank]) - 1))
    compute = [list(actions) for actions in schedule.compute]
    del compute[rank][place]
    broken = replace(schedule, compute=tuple(tuple(actions) for actions in compute))
    assume(not broken.is_forward_only)  # the only backward is gone: right, for evaluation
    assert schedule_problems(broken)
