"""When a send is done with, read off a schedule.

Its tensors must live until the peer has them. Waiting right after the send would stall this rank;
waiting at the end of the step would hold every activation that was ever sent. So a send is waited
for where it is certainly complete: behind the first receive whose message the peer sent after it
had used ours::

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1 ... 0RECV_B0 0B0     0SEND_F0 is done behind 0B0:
    rank 1   1RECV_F0 1F0 1B0 1SEND_B0 ...                  rank 1 used it, then sent the gradient

Where no message comes back, as in evaluation, a send is waited for behind the second one after it
that goes the same way: a rank runs ahead of another by two messages, and holds no more. That cannot
make ranks wait in a circle, since the lists that `lower` makes could not do so even if every send
waited for its receive at once. What is left is waited for when all ranks have agreed that the step
succeeded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from gt_pipeline.schedules import Action
from gt_pipeline.schedules.dependencies import Product, consumed_by, transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule

_MESSAGES_AHEAD = 2


def sends_done_after(lowered: LoweredSchedule, rank: int) -> dict[int, list[Action]]:
    """Sends of a rank by the position in its list behind which they are waited for.

    Those that are missing are waited for at the end.
    """
    actions, stage_to_rank = lowered.actions[rank], lowered.schedule.stage_to_rank
    peers: dict[int, _Peer] = {}
    done: dict[int, list[Action]] = {}
    for position, action in enumerate(actions):
        if not action.is_send:
            continue
        product = transferred_by(action)
        number = stage_to_rank[product.consumer_stage]
        if number not in peers:
            peers[number] = _Peer(lowered, rank, number)
        at = peers[number].done_after(product, position)
        if at is not None:
            done.setdefault(at, []).append(action)
    return done


class _Peer:
    """What a rank and one that it sends to tell each other, by positions in their lists."""

    def __init__(self, lowered: LoweredSchedule, rank: int, peer: int) -> None:
        num_stages = lowered.schedule.num_stages
        used_here = _positions_of_use(lowered.actions[rank], num_stages)
        answers = _sends_to(lowered, peer, rank)
        self._used_at = _positions_of_use(lowered.actions[peer], num_stages)
        self._sent_at = [position for _, position in _sends_to(lowered, rank, peer)]
        self._answered_at = [position for _, position in answers]
        backwards = itertools.accumulate((used_here[each] for each, _ in reversed(answers)), min)
        self._first_use_from = [*backwards][::-1]
        """Of an answer or one that was sent behind it."""

    def done_after(self, product: Product, position: int) -> int | None:
        """Behind which position a send is waited for; None for the end."""
        proof = bisect.bisect_right(self._answered_at, self._used_at[product])
        if proof < len(self._answered_at):
            return max(self._first_use_from[proof], position)
        later = bisect.bisect_right(self._sent_at, position) + _MESSAGES_AHEAD - 1
        return self._sent_at[later] if later < len(self._sent_at) else None


def _positions_of_use(actions: Sequence[Action], num_stages: int) -> dict[Product, int]:
    return {
        product: position
        for position, action in enumerate(actions)
        for part in action.compute_parts
        if (product := consumed_by(part, num_stages)) is not None
    }


def _sends_to(lowered: LoweredSchedule, rank: int, peer: int) -> list[tuple[Product, int]]:
    """What a rank sends to a peer, with the positions of the sends."""
    return [
        (product, position)
        for position, action in enumerate(lowered.actions[rank])
        if action.is_send
        and lowered.schedule.stage_to_rank[(product := transferred_by(action)).consumer_stage]
        == peer
    ]
