"""Schedules by name: what every one of them obeys, and that they are PyTorch's."""

from __future__ import annotations

import hashlib
from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock, patch

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from schedule_cases import SLOW_MACHINES, named_schedules, natural_schedule, text_of

from gt_pipeline._torch_internals import torch_schedule
from gt_pipeline.schedules import Schedule, schedule_of
from gt_pipeline.schedules.actions import ActionKind
from gt_pipeline.schedules.schedule import forward_only
from gt_pipeline.schedules.schedule_checks import schedule_problems
from gt_pipeline.schedules.schedule_rules import ScheduleStyle
from gt_pipeline.split import stage_indices_of_rank


@SLOW_MACHINES
@given(named_schedules())
def test_each_stage_runs_each_microbatch_forward_and_backward_once(schedule: Schedule) -> None:
    parts = Counter(
        (part.stage, part.microbatch, part.kind)
        for actions in schedule.compute
        for action in actions
        for part in action.compute_parts
    )
    assert set(parts.values()) == {1}
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = {kind for kind in get_args(ActionKind) if (stage, microbatch, kind) in parts}
            assert kinds in (
                {"FORWARD", "FULL_BACKWARD"},
                {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"},
            )
    assert len(parts) == sum(
        len(action.compute_parts) for actions in schedule.compute for action in actions
    )


@SLOW_MACHINES
@given(named_schedules())
def test_no_schedule_by_name_breaks_a_rule_nor_does_its_forward_part(schedule: Schedule) -> None:
    assert schedule_problems(schedule) == ()
    evaluation = forward_only(schedule)
    assert evaluation.is_forward_only
    assert schedule_problems(evaluation) == ()
    num_forwards = schedule.num_stages * schedule.num_microbatches
    assert sum(len(actions) for actions in evaluation.compute) == num_forwards


@pytest.mark.parametrize(
    ("name", "style", "stages_of_rank_0"),
    [("1F1B", "loop", (0,)), ("Interleaved1F1B", "loop", (0, 4)), ("ZBVZeroBubble", "v", (0, 7))],
)
def test_stages_lie_on_ranks_in_a_loop_or_a_v(
    name: str, style: ScheduleStyle, stages_of_rank_0: tuple[int, ...]
) -> None:
    schedule = natural_schedule(name, 4, 8)
    assert schedule.stages_of_rank(0) == stages_of_rank_0
    for rank in range(4):
        indices = stage_indices_of_rank(rank, 4, schedule.num_stages, style=style)
        assert schedule.stages_of_rank(rank) == indices


def test_1f1b_runs_what_pytorch_runs_and_not_what_its_table_says() -> None:
    """PyTorch's table of the last rank begins with the forward of microbatch 1, and ends with
    that of a microbatch which does not exist; its 1F1B runtime does not read the table."""
    schedule = schedule_of("1F1B", num_ranks=3, num_stages=3, num_microbatches=4)
    assert_expected_inline(
        text_of(schedule.compute),
        """\
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    )
    stage = SimpleNamespace(num_stages=3, group_size=3, group_rank=0, submod=None)
    theirs = torch_schedule("1F1B", [stage], n_microbatches=4).pipeline_order
    rows = [
        [str(each) for each in theirs[rank] if each is not None and each.is_compute_op]
        for rank in range(3)
    ]
    assert rows[:2] == [[str(each) for each in row] for row in schedule.compute[:2]]
    assert "2F0" not in rows[2]
    assert "2F4" in rows[2]


def test_gpipe_runs_all_forwards_first() -> None:
    schedule = schedule_of("gpipe", num_ranks=2, num_stages=2, num_microbatches=3)
    assert_expected_inline(
        text_of(schedule.compute),
        """\
0F0 0F1 0F2 0B0 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2""",
    )


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("num_microbatches", [4, 7])
@pytest.mark.parametrize("rank", range(4))
def test_single_stage_schedules_run_in_the_order_of_pytorchs_code(
    name: str, num_microbatches: int, rank: int
) -> None:
    ran: list[str] = []
    stage = MagicMock(stage_index=rank, num_stages=4, is_first=rank == 0, is_last=rank == 3)
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: ran.append(f"{rank}F{index}")
    stage.backward_one_chunk.side_effect = lambda index, **_: ran.append(f"{rank}B{index}")
    for moves in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, moves).return_value = []
    theirs: Any = torch_schedule(name, [stage], n_microbatches=num_microbatches)
    with patch.object(theirs, "_initialize_stage"):
        theirs._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    ours = schedule_of(name, num_ranks=4, num_stages=4, num_microbatches=num_microbatches)
    assert ran == [str(action) for action in ours.compute[rank]]


_DIGESTS = {
    "Interleaved1F1B": "d8a9b3ed42a2d5ea",
    "InterleavedZeroBubble": "7b81e07fee9cf7be",
    "ZBVZeroBubble": "c679120545767bab",
    "DualPipeV": "666ed5cb3b6bee87",
}


@pytest.mark.parametrize("name", _DIGESTS)
def test_pytorch_has_the_same_tables_in_all_versions_that_we_support(name: str) -> None:
    """If a new PyTorch changes one, its users' steps change: see what did before pinning it."""
    digest = hashlib.sha256()
    for num_ranks, num_microbatches in ((1, 4), (2, 4), (2, 6), (3, 9), (4, 8), (4, 12), (8, 16)):
        schedule = natural_schedule(name, num_ranks, num_microbatches)
        digest.update(f"{schedule.stage_to_rank} {text_of(schedule.compute)}".encode())
    assert digest.hexdigest()[:16] == _DIGESTS[name]


# The tables of PyTorch 2.13.0, 2.14.1 and 2.15.0 alike: a change in any of them shows here.
def test_interleaved_1f1b_on_two_ranks() -> None:
    assert_expected_inline(
        text_of(natural_schedule("Interleaved1F1B", 2, 4).compute),
        """\
0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    )


def test_interleaved_zero_bubble_on_two_ranks() -> None:
    assert_expected_inline(
        text_of(natural_schedule("InterleavedZeroBubble", 2, 4).compute),
        """\
0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3""",
    )


def test_zbv_on_two_ranks() -> None:
    assert_expected_inline(
        text_of(natural_schedule("ZBVZeroBubble", 2, 4).compute),
        """\
0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3""",
    )


def test_dualpipev_on_two_ranks() -> None:
    assert_expected_inline(
        text_of(natural_schedule("DualPipeV", 2, 4).compute),
        """\
0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3""",
    )
