"""No schedule lets ranks wait for each other's transfers in a circle; a planted circle is found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gt_pipeline.errors import RunnerSetupError, ScheduleError
from gt_pipeline.runner import GraphPPRunner
from gt_pipeline.runner.posted_order import circles
from gt_pipeline.schedules import SCHEDULE_NAMES, Schedule, lower, schedule_of
from gt_pipeline.schedules.actions import parse_action
from gt_pipeline.schedules.schedule import LoweredSchedule, forward_only


def schedules(name: str, *, max_ranks: int, max_microbatches: int) -> Iterator[Schedule]:
    """Every size of a schedule that it can have, with up to four virtual stages a rank."""
    for num_ranks, per_rank, num_microbatches in itertools.product(
        range(2, max_ranks + 1), range(1, 5), range(1, max_microbatches + 1)
    ):
        try:
            yield schedule_of(
                name,
                num_ranks=num_ranks,
                num_stages=per_rank * num_ranks,
                num_microbatches=num_microbatches,
            )
        except ScheduleError:
            continue


def assert_no_circle(name: str, *, max_ranks: int, max_microbatches: int) -> None:
    count = 0
    for schedule in schedules(name, max_ranks=max_ranks, max_microbatches=max_microbatches):
        for each, reduces in ((schedule, True), (forward_only(schedule), False)):
            assert circles(lower(each, unshards=True, reduces=reduces)) == (), schedule
        count += 1
    assert count > max_ranks - 2


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_small_schedule_can_deadlock(name: str) -> None:
    assert_no_circle(name, max_ranks=3, max_microbatches=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_schedule_can_deadlock(name: str) -> None:
    assert_no_circle(name, max_ranks=8, max_microbatches=16)


def lists(schedule: Schedule, *rows: str) -> LoweredSchedule:
    return LoweredSchedule(
        schedule=schedule,
        actions=tuple(tuple(map(parse_action, row.split())) for row in rows),
    )


def loop_of_three_ranks() -> Schedule:
    return schedule_of("Interleaved1F1B", num_ranks=3, num_stages=6, num_microbatches=3)


def test_a_circle_over_one_communicator_of_three_ranks_is_found() -> None:
    """Each rank posts first what its peer posts last::

    rank 0   to rank 1, to rank 2         rank 0's transfer to 1 waits for rank 1's to 2,
    rank 1   to rank 2, from rank 0       which waits for rank 0's to 2, which waits for the
    rank 2   from rank 0, from rank 1     first.
    """
    found = lists(
        loop_of_three_ranks(),
        # Microbatch 2 goes before, so that communicators of pairs exist.
        "0F2 0SEND_F2 3B2 3SEND_B2 0F0 0SEND_F0 3B0 3SEND_B0",
        "1RECV_F2 1F2 1SEND_F2 1F1 1SEND_F1 1RECV_F0 1F0",
        "2RECV_F2 2F2 2RECV_B2 2B2 2RECV_B0 2RECV_F1 2B0 2F1",
    )
    (circle,) = circles(found)
    assert circle.startswith("ranks wait in a circle: ")
    for transfer in ("0SEND_F0", "1SEND_F1", "3SEND_B0"):
        assert f"the transfer of {transfer}" in circle


def test_ranks_that_both_receive_first_are_found() -> None:
    schedule = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=2)
    found = lists(schedule, "0RECV_B0 0B0 0F0 0SEND_F0", "1RECV_F0 1F0 1B0 1SEND_B0")
    assert len(circles(found)) == 1


def test_a_transfer_that_one_rank_posts_is_found() -> None:
    schedule = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=2)
    assert circles(lists(schedule, "0F0 0SEND_F0", "1F0")) == (
        "0SEND_F0 has no counterpart: its rank waits forever",
    )


def test_of_lists_with_moved_transfers_many_are_found() -> None:
    """Moving one receive behind its use, or one send before what it needs, is always found."""
    random.seed(0)
    lowered = lower(loop_of_three_ranks(), unshards=False, reduces=False)
    for _ in range(40):
        rank = random.randrange(3)
        actions = list(lowered.actions[rank])
        received = [i for i, each in enumerate(actions) if each.is_receive]
        moved = actions.pop(random.choice(received))
        actions.append(moved)
        changed = replace(
            lowered,
            actions=tuple(
                tuple(actions) if i == rank else each for i, each in enumerate(lowered.actions)
            ),
        )
        assert circles(changed), (rank, moved)


def test_a_runner_refuses_lists_that_could_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_one_rank import _planned, _stages

    monkeypatch.setattr(
        "gt_pipeline.runner.graph_pp_runner.circles",
        lambda lowered: ("ranks wait in a circle: ...",),
    )
    with pytest.raises(RunnerSetupError, match="train steps would deadlock: ranks wait in a circ"):
        GraphPPRunner(_stages(), _planned())
