"""Whether the transfers of a step can wait for each other in a circle.

Every rank posts its sends and receives in the order of its list. What a posted operation waits for
depends on the backend:

- *NCCL*: the operations of one communicator run on a rank one after the other, in the order in
  which they were posted. One runs when both ranks have reached it. There is one communicator for
  each direction, or one for each direction and pair of ranks. The second is made by both ranks at
  once, at its first operation. An operation also waits for what its rank computed before it was
  posted. Computation waits for what it receives, and for sends whose memory it gives back.
- *gloo*: operations are matched by tag, and the host waits where computation does.

``circles`` joins all of these conditions, as if all held at once, and a send was not buffered. If
the result has no cycle, none of these backends can deadlock.

The problem is known from https://github.com/pytorch/pytorch/issues/196666: one communicator over
several pairs of ranks can let looped schedules deadlock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from gt_pipeline.runner.send_lifetimes import sends_done_after
from gt_pipeline.schedules import Action
from gt_pipeline.schedules.dependencies import Product, consumed_by, transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule


class _Posted(NamedTuple):
    """A rank, its host and its device, has reached an action of its list."""

    rank: int
    position: int


class _Pair(NamedTuple):
    """The communicator of two ranks in one direction, which both make at its first operation."""

    towards_higher: bool
    lower: int
    higher: int


def circles(lowered: LoweredSchedule) -> tuple[str, ...]:
    """Return a sentence for a circle in which ranks wait for each other; nothing if there is none.

    Args:
        lowered: the lists of all ranks; transfers that only one rank posts are circles too.
    """
    waits: TopologicalSorter[Hashable] = TopologicalSorter()
    posted: dict[Action, list[_Posted]] = {}
    for rank, actions in enumerate(lowered.actions):
        for event, sources in _waits_of_rank(lowered, rank, actions):
            waits.add(event, *sources)
        for index, action in enumerate(actions):
            if action.is_point_to_point:
                posted.setdefault(action, []).append(_Posted(rank, index))
    transfers = {transferred_by(action) for action in posted}
    alone = [
        f"{action} has no counterpart: its rank waits forever"
        for product in sorted(transfers)
        for action, other in ((product.send, product.receive), (product.receive, product.send))
        if action in posted and other not in posted
    ]
    if alone:
        return tuple(alone)
    for product in transfers:
        waits.add(product, *posted[product.send], *posted[product.receive])
    try:
        waits.prepare()
    except CycleError as error:
        shown = [_described(lowered, each) for each in reversed(error.args[1])]
        return (f"ranks wait in a circle: {', which waits for '.join(shown)}",)
    return ()


def _waits_of_rank(
    lowered: LoweredSchedule, rank: int, actions: Sequence[Action]
) -> Iterator[tuple[Hashable, list[Hashable]]]:
    """Yield the events of a rank, each with those that must come before."""
    stage_to_rank, num_stages = lowered.schedule.stage_to_rank, lowered.schedule.num_stages
    retired = sends_done_after(lowered, rank)
    last_of: dict[bool, Product] = {}
    made: set[_Pair] = set()
    before: list[Hashable] = []
    for index, action in enumerate(actions):
        for part in action.compute_parts:
            taken = consumed_by(part, num_stages)
            if taken is not None and stage_to_rank[taken.stage] != rank:
                before.append(taken)
        yield _Posted(rank, index), before
        before = []
        if action.is_point_to_point:
            product = transferred_by(action)
            other = product.consumer_stage if action.is_send else product.stage
            peer = stage_to_rank[other]
            towards_higher = (peer > rank) == action.is_send
            if towards_higher in last_of:
                yield product, [last_of[towards_higher]]
            last_of[towards_higher] = product
            pair = _Pair(towards_higher, min(rank, peer), max(rank, peer))
            if pair not in made:
                made.add(pair)
                yield pair, [_Posted(rank, index)]
                before = [pair]
        before += [_Posted(rank, index), *map(transferred_by, retired.get(index, ()))]


def _described(lowered: LoweredSchedule, event: Hashable) -> str:
    if isinstance(event, _Posted):
        return f"{lowered.actions[event.rank][event.position]} of rank {event.rank}"
    if isinstance(event, _Pair):
        return f"the communicator of ranks {event.lower} and {event.higher}"
    assert isinstance(event, Product)
    return f"the transfer of {event.send}"
