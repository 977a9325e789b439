"""The simulator: published idle times exactly, and what overlaps what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import (
    SLOW_MACHINES,
    any_schedules,
    natural_schedule,
    schedule_of_text,
)

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import ActionCosts, Schedule, lower, simulate
from gt_pipeline.schedules.actions import parse_action
from gt_pipeline.schedules.schedule import LoweredSchedule

_COSTS = ActionCosts(overlap_f_b=3.0)
F, DI, W, B, F_AND_B = 1.0, 1.0, 1.0, 2.0, 3.0

_each_size = pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"),
    [(2, 4), (4, 8), (4, 16), (4, 20), (8, 16), (8, 32)],
)


@_each_size
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_each_rank_idles_for_one_forward_and_backward_of_every_other_rank(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    timeline = simulate(natural_schedule(name, num_ranks, num_microbatches), _COSTS)
    assert timeline.idle == ((num_ranks - 1) * (F + B),) * num_ranks


@_each_size
def test_interleaved_zero_bubble_hides_all_weight_gradients(
    num_ranks: int, num_microbatches: int
) -> None:
    schedule = natural_schedule("InterleavedZeroBubble", num_ranks, num_microbatches)
    assert simulate(schedule, _COSTS).idle == ((num_ranks - 1) * (F + DI - W),) * num_ranks


@_each_size
def test_dualpipev_idles_as_published(num_ranks: int, num_microbatches: int) -> None:
    timeline = simulate(natural_schedule("DualPipeV", num_ranks, num_microbatches), _COSTS)
    assert timeline.idle == ((num_ranks - 1) * (F_AND_B + B - 3 * W),) * num_ranks


@pytest.mark.parametrize("f_and_b", [2.0, 2.5, 3.0])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_dualpipev_idles_as_published_whatever_an_overlap_gains(
    num_ranks: int, f_and_b: float
) -> None:
    schedule = natural_schedule("DualPipeV", num_ranks, 3 * num_ranks)
    timeline = simulate(schedule, ActionCosts(overlap_f_b=f_and_b))
    assert max(timeline.idle) == (num_ranks - 1) * (f_and_b + B - 3 * W)


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (2.0, 3.5), (0.75, 4.0)])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_interleaved_1f1b_idles_as_published_whatever_forward_and_backward_cost(
    num_ranks: int, forward: float, backward: float
) -> None:
    schedule = natural_schedule("Interleaved1F1B", num_ranks, 3 * num_ranks)
    timeline = simulate(schedule, ActionCosts(forward=forward, full_backward=backward))
    assert max(timeline.idle) == (num_ranks - 1) * (forward + backward)


@_each_size
def test_zbv_never_idles_between_a_ranks_first_and_last_action(
    num_ranks: int, num_microbatches: int
) -> None:
    timeline = simulate(natural_schedule("ZBVZeroBubble", num_ranks, num_microbatches), _COSTS)
    assert timeline.idle_within_span == (0.0,) * num_ranks


def test_the_numbers_that_are_published_for_four_and_eight_ranks() -> None:
    assert max(simulate(natural_schedule("DualPipeV", 4, 8), _COSTS).idle) == 6.0
    assert max(simulate(natural_schedule("DualPipeV", 8, 16), _COSTS).idle) == 14.0


@SLOW_MACHINES
@given(any_schedules(max_ranks=4), st.booleans())
def test_every_action_has_a_span_and_a_rank_computes_one_thing_at_a_time(
    schedule: Schedule, overlap: bool
) -> None:
    lowered = lower(schedule, unshards=True, reduces=True)
    costs = ActionCosts(transfer=0.25, unshard=0.5, reduce_grad=0.75)
    timeline = simulate(lowered, costs, overlap_communication=overlap)
    by_rank = [
        [each for each in timeline.spans if each.rank == rank] for rank in range(schedule.num_ranks)
    ]
    for rank, spans in enumerate(by_rank):
        assert tuple(each.action for each in spans) == lowered.actions[rank]
        computes = [each for each in spans if each.lane == "compute"]
        assert all(one.end <= other.start for one, other in pairwise(computes))
        assert timeline.compute[rank] == sum(each.duration for each in computes)
        assert timeline.idle[rank] == timeline.makespan - timeline.compute[rank]
    assert timeline.makespan == max(each.end for each in timeline.spans)


@SLOW_MACHINES
@given(any_schedules(max_ranks=4))
def test_overlap_of_communication_never_makes_a_schedule_slower(schedule: Schedule) -> None:
    lowered = lower(schedule, unshards=True, reduces=True)
    costs = ActionCosts(transfer=0.25, unshard=0.5, reduce_grad=0.75)
    overlapped = simulate(lowered, costs)
    blocking = simulate(lowered, costs, overlap_communication=False)
    assert overlapped.makespan <= blocking.makespan
    assert overlapped.compute == blocking.compute


def test_a_transfer_hides_behind_computation_if_it_may() -> None:
    """::

    rank 0  F0 F1        blocking: F0 -- F1 --
    rank 1     -- F0 F1               -- F0 -- F1
    """
    schedule = schedule_of_text("0F0 0F1", "1F0 1F1", stage_to_rank=(0, 1), num_microbatches=2)
    costs = ActionCosts(transfer=1.0)
    assert simulate(schedule, costs).makespan == 4.0
    assert simulate(schedule, costs, overlap_communication=False).makespan == 6.0


def test_two_ranks_move_one_tensor_at_a_time() -> None:
    schedule = schedule_of_text("0F0 0F1", "1F0 1F1", stage_to_rank=(0, 1), num_microbatches=2)
    spans = simulate(schedule, ActionCosts(forward=0.0, transfer=1.0)).spans
    assert [
        (str(each.action), each.start, each.end) for each in spans if each.lane == "transfer"
    ] == [
        ("0SEND_F0", 0.0, 1.0),
        ("0SEND_F1", 1.0, 2.0),
        ("1RECV_F0", 0.0, 1.0),
        ("1RECV_F1", 1.0, 2.0),
    ]


def test_computation_waits_for_parameters_and_the_end_for_gradients() -> None:
    schedule = schedule_of_text("0F0 0B0", stage_to_rank=(0,))
    lowered = lower(schedule, unshards=True, reduces=True)
    timeline = simulate(lowered, ActionCosts(unshard=5.0, reduce_grad=7.0))
    assert [(str(each.action), each.start, each.end) for each in timeline.spans] == [
        ("0UNSHARD", 0.0, 5.0),
        ("0F0", 5.0, 6.0),
        ("0B0", 6.0, 8.0),
        ("0REDUCE_GRAD", 8.0, 15.0),
        ("0RESHARD", 8.0, 8.0),
    ]
    assert timeline.idle == (12.0,)
    assert timeline.bubble == 0.8


@pytest.mark.parametrize(("overlap", "makespan"), [(True, 13.0), (False, 16.0)])
def test_gathers_run_beside_computation_only_if_asked_to(overlap: bool, makespan: float) -> None:
    """Two stages of one rank: the second is gathered while the first computes, or before it does.

    compute     0F    1F 1B 1B 0B 0B              0F 1F 1B 1B       0B 0B
    gathers  U U U U           R  R  R R R R   UUUU           R R R       R R R
    """
    schedule = schedule_of_text("0F0 1F0 1B0 0B0", stage_to_rank=(0, 0))
    lowered = lower(schedule, unshards=True, reduces=True)
    costs = ActionCosts(unshard=2.0, reduce_grad=3.0)
    timeline = simulate(lowered, costs, overlap_gathers=overlap)
    assert timeline.makespan == makespan
    assert timeline.compute == (6.0,)


def test_costs_can_be_a_function_or_a_table_of_measurements() -> None:
    schedule = schedule_of_text("0F0 0B0", stage_to_rank=(0,))
    measured = {parse_action("0F0"): 3.0, parse_action("0B0"): 4.0}
    assert simulate(schedule, measured.__getitem__).makespan == 7.0


def test_a_whole_backward_costs_its_halves_and_an_overlap_its_parts_unless_told() -> None:
    overlap_f_b = parse_action("(0F1;0B0)OVERLAP_F_B")
    overlap_f_i = parse_action("(0F1;0I0)OVERLAP_F_B")
    costs = ActionCosts(forward=1.0, backward_input=2.0, backward_weight=4.0)
    assert [costs(each) for each in (parse_action("0B0"), overlap_f_b, overlap_f_i)] == [6, 7, 3]
    told = ActionCosts(full_backward=8.0, overlap_f_b=16.0, overlap_f_i=32.0)
    assert [told(each) for each in (parse_action("0B0"), overlap_f_b, overlap_f_i)] == [8, 16, 32]


def test_refuses_costs_that_are_no_time() -> None:
    with pytest.raises(ScheduleError) as caught:
        ActionCosts(forward=-1.0, transfer=float("nan"))
    assert_expected_inline(
        str(caught.value),
        """\
costs of actions must be 0 or more:
  - forward is -1.0, not a time
  - transfer is nan, not a time""",
    )


def test_ranks_that_are_stuck_are_named_with_what_they_wait_for() -> None:
    schedule = schedule_of_text("0F0 0B0", "1F0 1B0", stage_to_rank=(0, 1))
    lists = ("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    lowered = LoweredSchedule(
        schedule=schedule,
        actions=tuple(tuple(parse_action(text) for text in each.split()) for each in lists),
    )
    with pytest.raises(ScheduleError) as caught:
        simulate(lowered)
    assert_expected_inline(
        str(caught.value),
        """\
by hand: ranks wait for each other forever:
  - rank 0 stands at 0B0 (place 2 of its list) and waits for 1SEND_B0 of rank 1 to arrive
  - rank 1 stands at 1F0 (place 1 of its list) and waits for 0SEND_F0 of rank 0 to arrive""",
    )
    with pytest.raises(ScheduleError) as caught:
        simulate(lowered, overlap_communication=False)
    assert_expected_inline(
        str(caught.value),
        """\
by hand: ranks wait for each other forever:
  - rank 0 stands at 0RECV_B0 (place 1 of its list) and waits for 1SEND_B0, its counterpart
  - rank 1 stands at 1RECV_F0 (place 0 of its list) and waits for 0SEND_F0, its counterpart""",
    )
