"""What is wrong with the lists of a lowered schedule: everything, at once."""

from __future__ import annotations

from expecttest import assert_expected_inline
from schedule_cases import schedule_of_text

from gt_pipeline.schedules.actions import parse_action
from gt_pipeline.schedules.lowering import lowered_problems
from gt_pipeline.schedules.schedule import LoweredSchedule

_SCHEDULE = schedule_of_text("0F0 0B0", "1F0 1B0", stage_to_rank=(0, 1))
_RIGHT = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def _lowered(*ranks: str) -> LoweredSchedule:
    return LoweredSchedule(
        schedule=_SCHEDULE,
        actions=tuple(tuple(parse_action(text) for text in rank.split()) for rank in ranks),
    )


def _problems(*ranks: str) -> str:
    return "\n".join(lowered_problems(_lowered(*ranks)))


def test_right_lists_have_no_problem() -> None:
    assert _problems(*_RIGHT) == ""


def test_a_list_that_computes_something_else_is_reported() -> None:
    assert_expected_inline(
        _problems("0F0 0SEND_F0 0RECV_B0", _RIGHT[1]),
        """\
rank 0 does not compute what the schedule says
rank 0: 0RECV_B0 moves nothing that has to change ranks""",
    )


def test_lists_of_too_few_ranks_are_reported() -> None:
    assert _problems(_RIGHT[0]) == "there are lists of 1 ranks, not of 2"


def test_transfers_that_are_missing_too_early_or_double_are_reported() -> None:
    assert_expected_inline(
        _problems("0SEND_F0 0F0 0B0 0RECV_B0", "1RECV_F0 1RECV_F0 1F0 1B0 1SEND_F0"),
        """\
rank 0: 0SEND_F0 is missing after 0F0
rank 0: 0RECV_B0 is missing before 0B0
rank 1: 1RECV_F0 stands 2 times in the list
rank 1: 1SEND_B0 is missing after 1B0
rank 1: 1SEND_F0 moves nothing that has to change ranks""",
    )


def test_parameters_that_are_not_there_are_reported() -> None:
    assert_expected_inline(
        _problems(
            "0F0 0UNSHARD 0SEND_F0 0RECV_B0 0B0 0UNSHARD",
            "1UNSHARD 1RECV_F0 1F0 1RESHARD 1B0 1SEND_B0 1RESHARD",
        ),
        """\
rank 0: 0F0 runs without its parameters: no 0UNSHARD before
rank 0: 0UNSHARD gathers what is already there
rank 0: 0RESHARD is missing at the end
rank 1: 1B0 runs without its parameters: no 1UNSHARD before
rank 1: 1RESHARD drops what is not there""",
    )


def test_reductions_that_are_too_early_are_reported() -> None:
    assert_expected_inline(
        _problems("0F0 0SEND_F0 0RECV_B0 0REDUCE_GRAD 0B0", _RIGHT[1] + " 1REDUCE_GRAD"),
        """rank 0: 0REDUCE_GRAD is missing after 0B0, the stage's last backward""",
    )


def test_ranks_that_order_their_transfers_differently_are_reported() -> None:
    schedule = schedule_of_text("0F0 0F1", "1F0 1F1", stage_to_rank=(0, 1), num_microbatches=2)
    lowered = LoweredSchedule(
        schedule=schedule,
        actions=tuple(
            tuple(parse_action(text) for text in rank.split())
            for rank in ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
        ),
    )
    assert_expected_inline(
        "\n".join(lowered_problems(lowered)),
        """transfer 0 between ranks 0 and 1 is 0SEND_F0 for one and 0SEND_F1 for the other""",
    )


def test_ranks_that_wait_in_a_circle_of_three_are_reported() -> None:
    """Every two ranks agree on an order, and still each waits for the next."""
    schedule = schedule_of_text(
        "0F0 3F0 0F1 3F1", "1F0 1F1", "2F0 2F1", stage_to_rank=(0, 1, 2, 0), num_microbatches=2
    )
    lowered = LoweredSchedule(
        schedule=schedule,
        actions=tuple(
            tuple(parse_action(text) for text in rank.split())
            for rank in (
                "0F0 3RECV_F0 0SEND_F0 3F0 0F1 0SEND_F1 3RECV_F1 3F1",
                "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1",
                "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1",
            )
        ),
    )
    assert_expected_inline(
        "\n".join(lowered_problems(lowered)),
        """\
rank 0 stands at 3RECV_F0 (place 1 of its list) and waits for 2SEND_F0, its counterpart
rank 1 stands at 1RECV_F0 (place 0 of its list) and waits for 0SEND_F0, its counterpart
rank 2 stands at 2RECV_F0 (place 0 of its list) and waits for 1SEND_F0, its counterpart""",
    )
