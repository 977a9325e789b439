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

from collections.abc import Sequence

from gt_pipeline.schedules import Action
from gt_pipeline.schedules.dependencies import Product, consumed_by, transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule

_MESSAGES_AHEAD = 2


def sends_done_after(lowered: LoweredSchedule, rank: int) -> dict[int, list[Action]]:
    """Sends of a rank by the position in its list behind which they are waited for.

    Those that are missing are waited for at the end.
    """
    schedule = lowered.schedule
    used_at = [_positions_of_use(actions, schedule.num_stages) for actions in lowered.actions]
    done: dict[int, list[Action]] = {}
    for position, action in enumerate(lowered.actions[rank]):
        if not action.is_send:
            continue
        product = transferred_by(action)
        peer = schedule.stage_to_rank[product.consumer_stage]
        used_by_peer = used_at[peer][product]
        proofs = [
            used_at[rank][answer]
            for answer, sent_at in _sends_to(lowered, peer, rank)
            if sent_at > used_by_peer
        ]
        later = [sent_at for _, sent_at in _sends_to(lowered, rank, peer) if sent_at > position]
        if proofs:
            done.setdefault(max(min(proofs), position), []).append(action)
        elif len(later) >= _MESSAGES_AHEAD:
            done.setdefault(later[_MESSAGES_AHEAD - 1], []).append(action)
    return done


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
