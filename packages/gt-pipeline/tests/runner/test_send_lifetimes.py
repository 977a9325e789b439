"""Where a send is known to be complete: never too early, and early enough to free memory.

A send of rank 0, the message that proves its arrival, and where it is waited for::

    rank 0   F0 >F0  F1 >F1  <B0 B0  <B1 B1
    rank 1       <F0 F0 B0 >B0   <F1 F1 B1 >B1

    >F0 is done behind B0: rank 1 used F0 before it sent B0.
"""

from __future__ import annotations

import pytest
from runner_cases import schedule

from gt_pipeline.runner.send_lifetimes import sends_done_after
from gt_pipeline.schedules import SCHEDULE_NAMES, Schedule, lower, schedule_of
from gt_pipeline.schedules.dependencies import Product, consumed_by, transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule, forward_only


def _lowered(name: str) -> LoweredSchedule:
    return lower(schedule(name), unshards=False, reduces=False)


def test_a_forward_is_done_behind_the_backward_of_its_microbatch() -> None:
    planned = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=2)
    lowered = lower(planned, unshards=False, reduces=False)
    actions = [str(action) for action in lowered.actions[0]]
    done = {
        actions[position]: [str(send) for send in sends]
        for position, sends in sends_done_after(lowered, 0).items()
    }
    assert done == {"0B0": ["0SEND_F0"], "0B1": ["0SEND_F1"]}


def test_the_last_message_is_waited_for_at_the_end() -> None:
    planned = schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=2)
    lowered = lower(planned, unshards=False, reduces=False)
    done = [send for sends in sends_done_after(lowered, 1).values() for send in sends]
    assert "1SEND_B1" not in map(str, done)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_send_is_waited_for_before_it_started(name: str) -> None:
    lowered = _lowered(name)
    for rank, actions in enumerate(lowered.actions):
        for position, sends in sends_done_after(lowered, rank).items():
            assert all(actions.index(send) < position for send in sends)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_waiting_for_each_send_leaves_no_circular_wait(name: str, evaluates: bool) -> None:
    """Runs all lists; where a send is waited for, a rank stands until the peer has received it."""
    planned = schedule(name)
    lowered = lower(forward_only(planned) if evaluates else planned, unshards=False, reduces=False)
    waits = [sends_done_after(lowered, rank) for rank in range(lowered.num_ranks)]
    at = [0] * lowered.num_ranks
    sent: set[Product] = set()
    received: set[Product] = set()
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lowered.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                taken = [consumed_by(part, planned.num_stages) for part in action.compute_parts]
                if any(
                    each is not None
                    and planned.stage_to_rank[each.stage] != rank
                    and each not in sent
                    for each in taken
                ):
                    break
                if action.is_send:
                    sent.add(transferred_by(action))
                if action.is_receive:
                    received.add(transferred_by(action))
                if any(
                    transferred_by(each) not in received for each in waits[rank].get(at[rank], ())
                ):
                    break
                at[rank] += 1
                progress = True
    assert at == [len(actions) for actions in lowered.actions]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_long_evaluation_holds_few_sends(name: str) -> None:
    planned = forward_only(schedule(name, num_microbatches=32))
    assert max(_most_pending(planned)) <= 12  # three of each of a rank's ways


def test_a_long_1f1b_holds_as_many_sends_as_it_has_warmup_forwards() -> None:
    assert _most_pending(schedule("1F1B", num_microbatches=32)) == [4, 3, 3, 2]


def _most_pending(planned: Schedule) -> list[int]:
    """The most sends that are under way at once, by rank."""
    lowered = lower(planned, unshards=False, reduces=False)
    most = []
    for rank, actions in enumerate(lowered.actions):
        done = sends_done_after(lowered, rank)
        pending, counts = 0, [0]
        for position, action in enumerate(actions):
            pending += action.is_send
            counts.append(pending)
            pending -= len(done.get(position, ()))
        most.append(max(counts))
    return most
