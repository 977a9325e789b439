"""Lowered schedules: what is added, where, and that nothing can deadlock."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import (
    SLOW_MACHINES,
    any_schedules,
    natural_schedule,
    schedule_of_text,
    text_of,
)

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import Action, ActionCosts, Schedule, lower, simulate
from gt_pipeline.schedules.actions import parse_action
from gt_pipeline.schedules.lowering import lowered_problems
from gt_pipeline.schedules.schedule import forward_only

_costs = st.builds(
    ActionCosts,
    forward=st.floats(0, 4),
    backward_input=st.floats(0, 4),
    backward_weight=st.floats(0, 4),
    full_backward=st.one_of(st.none(), st.floats(0, 4)),
    overlap_f_b=st.one_of(st.none(), st.floats(0, 4)),
)


@SLOW_MACHINES
@given(
    any_schedules(),
    _costs,
    st.booleans(),
    st.booleans(),
    st.integers(2, 4),
)
def test_at_any_costs_it_breaks_no_rule_and_ends_even_if_communication_blocks(
    schedule: Schedule,
    costs: ActionCosts,
    unshards: bool,
    reduces: bool,
    max_unsharded_stages: int,
) -> None:
    lowered = lower(
        schedule,
        unshards=unshards,
        reduces=reduces,
        max_unsharded_stages=max_unsharded_stages,
        costs=costs,
    )
    assert lowered_problems(lowered) == ()
    simulate(lowered, overlap_communication=False)  # raises where ranks are stuck


@SLOW_MACHINES
@given(any_schedules())
def test_every_send_has_its_receive_and_nothing_moves_within_a_rank(schedule: Schedule) -> None:
    lowered = lower(schedule, unshards=False, reduces=False)
    sends = {each for actions in lowered.actions for each in actions if each.is_send}
    receives = {each for actions in lowered.actions for each in actions if each.is_receive}
    assert {
        Action(
            send.stage + (1 if send.kind == "SEND_F" else -1),
            "RECV_F" if send.kind == "SEND_F" else "RECV_B",
            send.microbatch,
        )
        for send in sends
    } == receives
    crossings = sum(
        schedule.stage_to_rank[stage] != schedule.stage_to_rank[stage + 1]
        for stage in range(schedule.num_stages - 1)
    )
    assert len(sends) == 2 * crossings * schedule.num_microbatches


@SLOW_MACHINES
@given(any_schedules(), st.integers(2, 3))
def test_a_rank_never_holds_more_gathered_stages_than_it_may(
    schedule: Schedule, max_unsharded_stages: int
) -> None:
    lowered = lower(
        schedule, unshards=True, reduces=True, max_unsharded_stages=max_unsharded_stages
    )
    for actions in lowered.actions:
        held: set[int] = set()
        for action in actions:
            if action.kind == "UNSHARD":
                held.add(action.stage)
            if action.kind == "RESHARD":
                held.remove(action.stage)
            assert len(held) <= max_unsharded_stages
        assert not held


@SLOW_MACHINES
@given(any_schedules(), st.integers(0, 3))
def test_a_rank_never_holds_more_gathered_bytes_than_it_may(
    schedule: Schedule, num_spare: int
) -> None:
    """Stage i has 10 + i bytes, so that an action needs those of its last stages at most."""
    bytes_of = {stage: 10 + stage for stage in range(schedule.num_stages)}
    most = sum(sorted(bytes_of.values())[-2:]) + num_spare
    lowered = lower(
        schedule,
        unshards=True,
        reduces=True,
        max_unsharded_bytes=most,
        unsharded_bytes=bytes_of,
    )
    for actions in lowered.actions:
        held: set[int] = set()
        for action in actions:
            held |= {action.stage} if action.kind == "UNSHARD" else set()
            held -= {action.stage} if action.kind == "RESHARD" else set()
            assert sum(bytes_of[stage] for stage in held) <= most
            assert held >= {part.stage for part in action.compute_parts}


def test_bytes_of_which_nothing_is_known_are_no_limit() -> None:
    schedule = natural_schedule("DualPipeV", 2, 4)
    without = lower(schedule, unshards=True, reduces=True)
    assert lower(schedule, unshards=True, reduces=True, max_unsharded_bytes=1) == without


@SLOW_MACHINES
@given(any_schedules())
def test_each_stage_reduces_its_gradients_once_and_evaluation_never(schedule: Schedule) -> None:
    lowered = lower(schedule, unshards=False, reduces=True)
    reductions = [
        each.stage for actions in lowered.actions for each in actions if each.kind == "REDUCE_GRAD"
    ]
    assert sorted(reductions) == list(range(schedule.num_stages))
    evaluation = lower(forward_only(schedule), unshards=True, reduces=True)
    kinds = {each.kind for actions in evaluation.actions for each in actions}
    assert "REDUCE_GRAD" not in kinds
    assert "SEND_B" not in kinds


def test_overlaps_of_a_v_schedule_stay_whole_and_hand_over_locally_at_its_turn() -> None:
    lowered = lower(natural_schedule("DualPipeV", 2, 4), unshards=True, reduces=True)
    assert_expected_inline(
        text_of(lowered.actions),
        """\
0UNSHARD 3UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 3RECV_F0 3F0 3I0 3SEND_B0 3RECV_F1 3W0 3F1 (0F3;3B1)OVERLAP_F_B 0SEND_F3 3SEND_B1 3RECV_F2 0RECV_B0 (3F2;0B0)OVERLAP_F_B 3B2 3SEND_B2 3RECV_F3 0RECV_B1 (3F3;0B1)OVERLAP_F_B 0RECV_B2 3B3 3SEND_B3 3REDUCE_GRAD 3RESHARD 0I2 0W2 0RECV_B3 0I3 0W3 0REDUCE_GRAD 0RESHARD
1RECV_F0 1RECV_F1 1UNSHARD 2UNSHARD 1F0 1RECV_F2 2F0 2SEND_F0 1F1 2RECV_B0 2F1 2SEND_F1 1F2 2B0 1RECV_F3 2RECV_B1 (2F2;1B0)OVERLAP_F_B 2SEND_F2 1SEND_B0 (1F3;2B1)OVERLAP_F_B 2RECV_B2 (2F3;1B1)OVERLAP_F_B 2SEND_F3 1SEND_B1 2B2 1B2 1SEND_B2 2RECV_B3 2I3 1I3 1SEND_B3 2W3 2REDUCE_GRAD 2RESHARD 1W3 1REDUCE_GRAD 1RESHARD""",
    )


def test_a_looped_schedule_with_parameters_gathered_one_stage_at_a_time() -> None:
    schedule = natural_schedule("Interleaved1F1B", 2, 2)
    lowered = lower(schedule, unshards=True, reduces=True, max_unsharded_stages=1)
    assert_expected_inline(
        text_of(lowered.actions),
        """\
0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 0RESHARD 2UNSHARD 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 2REDUCE_GRAD 0RECV_B0 2RESHARD 0UNSHARD 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD
1RECV_F0 1RECV_F1 1UNSHARD 1F0 1SEND_F0 3RECV_F0 1F1 1SEND_F1 3RECV_F1 1RESHARD 3UNSHARD 3F0 3B0 3SEND_B0 3F1 1RECV_B0 3B1 3SEND_B1 3REDUCE_GRAD 1RECV_B1 3RESHARD 1UNSHARD 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD""",
    )


def test_a_forward_can_overlap_a_backward_of_the_input_alone() -> None:
    schedule = schedule_of_text(
        "0F0 0F1 (0F2;0I0)OVERLAP_F_B 0W0 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
        stage_to_rank=(0, 1),
        num_microbatches=3,
    )
    lowered = lower(schedule, unshards=False, reduces=False)
    assert parse_action("(0F2;0I0)OVERLAP_F_B") in lowered.actions[0]
    assert_expected_inline(
        text_of(lowered.actions),
        """\
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 (0F2;0I0)OVERLAP_F_B 0SEND_F2 0W0 0RECV_B1 0B1 0RECV_B2 0B2
1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2""",
    )


def test_a_receive_stands_before_what_its_rank_runs_meanwhile() -> None:
    """Rank 1 runs a long forward of its own while rank 0 makes what it needs next."""
    schedule = schedule_of_text("1F0 1F1", "0F0 0F1", stage_to_rank=(1, 0), num_microbatches=2)
    lowered = lower(schedule, unshards=False, reduces=False, costs=_slow_second_stage)
    assert_expected_inline(
        text_of(lowered.actions),
        """\
1RECV_F0 1RECV_F1 1F0 1F1
0F0 0SEND_F0 0F1 0SEND_F1""",
    )


def _slow_second_stage(action: Action) -> float:
    return 10.0 if action.stage == 1 else 1.0


def test_refuses_fewer_gathered_stages_than_one_action_uses() -> None:
    with pytest.raises(ScheduleError) as caught:
        lower(
            natural_schedule("DualPipeV", 2, 4), unshards=True, reduces=True, max_unsharded_stages=1
        )
    assert_expected_inline(
        str(caught.value),
        """\
max_unsharded_stages is 1:
  - DualPipeV has actions that use 2 stages at once""",
    )


def test_refuses_fewer_gathered_bytes_than_actions_use() -> None:
    with pytest.raises(ScheduleError) as caught:
        lower(
            natural_schedule("DualPipeV", 2, 4),
            unshards=True,
            reduces=True,
            max_unsharded_bytes=2000,
            unsharded_bytes={0: 1500, 1: 900, 2: 1200, 3: 700},
        )
    assert_expected_inline(
        str(caught.value),
        """\
max_unsharded_bytes is 2,000:
  - an action needs 2,200 bytes of gathered parameters, of stage 0 and stage 3
  - an action needs 2,100 bytes of gathered parameters, of stage 1 and stage 2""",
    )


def test_refuses_a_schedule_that_cannot_run() -> None:
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        lower(
            schedule_of_text("0F0", "1F0 1B0", stage_to_rank=(0, 1)), unshards=False, reduces=False
        )
