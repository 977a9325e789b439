"""A lowered schedule on paper, moment by moment: what ``gt_pipeline`` simulates in another way.

``gt_pipeline.schedules.simulate`` takes each rank as far as it gets and works out when things
begin. Here one clock goes for all ranks from event to event, and at each moment everyone looks at
what has arrived by then, as machines do. Nothing is shared with it but the text of the schedule:
which action needs what is read off the actions' names here.

The rules: a rank runs its list in order. A computation waits for its parameters and for what other
stages make for it. What is sent and received is posted, and the rank goes on; a transfer begins
when both ends have posted it and the pair's transfer before it is over. Gathers and reductions hold
the rank up, or run one after another beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gt_pipeline.schedules import Action
from gt_pipeline.schedules.schedule import LoweredSchedule

_Message = tuple[str, int, int]
"""Direction, the stage that makes it, microbatch."""


@dataclass(slots=True)
class _Rank:
    actions: Sequence[Action]
    position: int = 0
    free_at: float = 0.0
    gathers_free_at: float = 0.0
    computed: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.position == len(self.actions)


@dataclass(slots=True)
class _World:
    ranks: list[_Rank]
    stage_to_rank: Sequence[int]
    cost: Callable[[Action], float]
    overlap_gathers: bool
    queues: dict[frozenset[int], deque[_Message]]
    posted: dict[_Message, set[int]] = field(default_factory=lambda: defaultdict(set))
    sends: dict[_Message, Action] = field(default_factory=dict)
    channel_free_at: dict[frozenset[int], float] = field(default_factory=dict)
    arrives_at: dict[_Message, float] = field(default_factory=dict)
    gathered_at: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepByStep:
    """What came out."""

    makespan: float
    idle: tuple[float, ...]
    """How long each rank did not compute."""


def simulate_step_by_step(
    lowered: LoweredSchedule, cost: Callable[[Action], float], *, overlap_gathers: bool
) -> StepByStep:
    """Run the lists of all ranks on one clock.

    Raises:
        RuntimeError: nothing happens any more, and lists are left.
    """
    stage_to_rank = lowered.schedule.stage_to_rank
    ranks = [_Rank(actions) for actions in lowered.actions]
    queues: dict[frozenset[int], deque[_Message]] = defaultdict(deque)
    for rank, actions in enumerate(lowered.actions):
        for action in actions:
            if action.kind in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
                pair = _pair(action, stage_to_rank)
                if rank == min(pair):  # both ends have them in one order
                    queues[pair].append(_message(action))
    world = _World(ranks, stage_to_rank, cost, overlap_gathers, dict(queues))
    now = end = 0.0
    while True:
        while any(_advance(world, number, now) for number in range(len(ranks))) or any(
            _begin_transfer(world, pair, now) for pair in world.queues
        ):
            pass  # until nothing more happens at this moment
        times = [
            *(rank.free_at for rank in ranks),
            *(rank.gathers_free_at for rank in ranks),
            *world.arrives_at.values(),
            *world.gathered_at.values(),
        ]
        end = max(end, *times)
        later = [time for time in times if time > now]
        if not later:
            break
        now = min(later)
    if any(not rank.is_done for rank in ranks):
        raise RuntimeError("ranks wait for each other forever")
    return StepByStep(makespan=end, idle=tuple(end - rank.computed for rank in ranks))


def _advance(world: _World, number: int, now: float) -> bool:
    """Let one rank do its next action, if it can now."""
    rank = world.ranks[number]
    if rank.is_done or rank.free_at > now:
        return False
    action = rank.actions[rank.position]
    if action.kind in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
        message = _message(action)
        world.posted[message].add(number)
        if action.kind.startswith("SEND"):
            world.sends[message] = action
    elif action.kind == "UNSHARD" or action.kind == "REDUCE_GRAD":
        begin = max(now, rank.gathers_free_at)
        rank.gathers_free_at = begin + world.cost(action)
        if not world.overlap_gathers:
            rank.free_at = rank.gathers_free_at
        if action.kind == "UNSHARD":
            world.gathered_at[action.stage] = rank.gathers_free_at
    elif action.kind != "RESHARD":
        parts = action.parts or (action,)
        if any(not _is_ready(world, part, now) for part in parts):
            return False
        duration = world.cost(action)
        rank.free_at = now + duration
        rank.computed += duration
    rank.position += 1
    return True


def _is_ready(world: _World, part: Action, now: float) -> bool:
    if world.gathered_at.get(part.stage, -math.inf) > now:
        return False
    if part.kind == "FORWARD":
        before, direction = part.stage - 1, "F"
    elif part.kind in ("FULL_BACKWARD", "BACKWARD_INPUT"):
        before, direction = part.stage + 1, "B"
    else:
        return True
    if not 0 <= before < len(world.stage_to_rank):
        return True
    if world.stage_to_rank[before] == world.stage_to_rank[part.stage]:
        return True  # made by this rank, earlier in its list
    assert part.microbatch is not None
    return world.arrives_at.get((direction, before, part.microbatch), math.inf) <= now


def _begin_transfer(world: _World, pair: frozenset[int], now: float) -> bool:
    queue = world.queues[pair]
    if not queue or len(world.posted[queue[0]]) < 2:
        return False
    if world.channel_free_at.get(pair, 0.0) > now:
        return False
    message = queue.popleft()
    arrival = now + world.cost(world.sends[message])
    world.channel_free_at[pair] = world.arrives_at[message] = arrival
    return True


def _message(action: Action) -> _Message:
    """What a send or a receive is about: SEND_F and RECV_F are of the stage and the one after."""
    assert action.microbatch is not None
    direction = action.kind[-1]
    maker = action.stage
    if action.kind == "RECV_F":
        maker -= 1
    elif action.kind == "RECV_B":
        maker += 1
    return direction, maker, action.microbatch


def _pair(action: Action, stage_to_rank: Sequence[int]) -> frozenset[int]:
    direction, maker, _ = _message(action)
    taker = maker + 1 if direction == "F" else maker - 1
    return frozenset({stage_to_rank[maker], stage_to_rank[taker]})
