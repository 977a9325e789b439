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
from gt_pipeline.schedules import SCHEDULE_NAMES, LoweredSchedule, forward_only, lower, schedule_of
from gt_pipeline.schedules.dependencies import consumed_by, transferred_by


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


def test_a_last_message_has_no_proof() -> None:
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


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_waiting_for_each_send_leaves_no_circular_wait(name: str) -> None:
    """Runs all lists with sends that block, where they are waited for, until they are used."""
    lowered = _lowered(name)
    num_stages = lowered.schedule.num_stages
    waits = [sends_done_after(lowered, rank) for rank in range(lowered.num_ranks)]
    at = [0] * lowered.num_ranks
    sent, used = set(), set()
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lowered.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needs = [consumed_by(part, num_stages) for part in action.compute_parts]
                remote = [
                    each
                    for each in needs
                    if each is not None and lowered.schedule.stage_to_rank[each.stage] != rank
                ]
                if any(each not in sent for each in remote):
                    break
                used.update(remote)
                if action.kind.is_send:
                    sent.add(transferred_by(action))
                # What stands here was used by the peer already, so nothing waits.
                for send in waits[rank].get(at[rank], ()):
                    assert transferred_by(send) in used
                at[rank] += 1
                progress = True
    assert at == [len(actions) for actions in lowered.actions]


def test_most_sends_of_a_long_1f1b_are_done_long_before_the_end() -> None:
    planned = schedule_of("1F1B", num_ranks=4, num_stages=4, num_microbatches=32)
    lowered = lower(planned, unshards=False, reduces=False)
    for rank in range(4):
        pending = most = 0
        done = sends_done_after(lowered, rank)
        for position, action in enumerate(lowered.actions[rank]):
            pending += action.kind.is_send
            most = max(most, pending)
            pending -= len(done.get(position, ()))
        assert most <= 10


def test_evaluation_has_no_answers() -> None:
    planned = forward_only(schedule_of("1F1B", num_ranks=2, num_stages=2, num_microbatches=4))
    assert sends_done_after(lower(planned, unshards=False, reduces=False), 0) == {}
