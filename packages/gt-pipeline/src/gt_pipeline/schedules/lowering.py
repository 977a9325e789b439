"""From what ranks compute to all that they do: transfers, parameters gathered, gradients reduced.

Source: torch.distributed.pipelining lowers its schedules in the same three steps. This one also
keeps OVERLAP_F_B whole, hands products over locally where both stages are on one rank, and proves
what it makes.

**Why nothing can deadlock.** Compute actions of all ranks are put into one order, by the time at
which they end in a simulation at given costs, and the transfer of a product stands right after the
action that made it. A rank's list is that order, restricted to what concerns the rank. So every two
ranks agree on the order of the transfers between them, and each action, in all lists, waits only
for what stands earlier in one common order: even if sends and receives blocked until their
counterpart ran, no rank would wait in a circle. The lists are checked for it all the same.

A receive stands before the action that its rank runs while the product is made, so the transfer
can hide behind that action.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.compute_order import compute_times
from gt_pipeline.schedules.costs import UNIT_COSTS, CostModel
from gt_pipeline.schedules.dependencies import Product, consumed_by, produced_by, transferred_by
from gt_pipeline.schedules.rank_lists import RankLists
from gt_pipeline.schedules.schedule import LoweredSchedule, Schedule
from gt_pipeline.schedules.schedule_checks import check_schedule


def lower(
    schedule: Schedule,
    *,
    unshards: bool,
    reduces: bool,
    max_unsharded_stages: int = 3,
    max_unsharded_bytes: int | None = None,
    unsharded_bytes: Mapping[int, int] | None = None,
    costs: CostModel = UNIT_COSTS,
) -> LoweredSchedule:
    """Add to a schedule what moves data.

    - SEND_F/RECV_F and SEND_B/RECV_B where neighbouring stages are on two ranks. Where they are on
      one, as at the turn of a V, the runner hands the product over, and no action says so.
    - UNSHARD before a stage's first use, RESHARD after its last: a rank holds the parameters of the
      next ``max_unsharded_stages`` stages that it will use, as far as ``max_unsharded_bytes``
      allow, and fetches them that early.
    - REDUCE_GRAD after a stage's last backward, behind the transfer of what that backward made.

    Args:
        schedule: what to compute; it is checked.
        unshards: whether stages gather their parameters.
        reduces: whether stages reduce their gradients.
        max_unsharded_stages: stages of a rank whose parameters are gathered at any time, at least
            two if it has OVERLAP_F_B actions of two stages.
        max_unsharded_bytes: of these parameters; None: no limit.
        unsharded_bytes: gathered parameters of each stage; a stage that is missing counts nothing.
        costs: of compute actions, by which the actions of different ranks are put in order. Any
            costs give a schedule that can run; right ones let more transfers hide.

    Raises:
        ScheduleError: the schedule cannot run, or what an action needs exceeds a limit.
    """
    check_schedule(schedule)
    limit = _Limit(
        # Without any stage to gather, nothing is.
        num_stages=max_unsharded_stages if unshards else 0,
        num_bytes=max_unsharded_bytes,
        bytes_of=unsharded_bytes or {},
    )
    if unshards:
        _check_limit(schedule, limit)
    gather = [_unshards_of(actions, limit) for actions in schedule.compute]
    reduced_after = [_last_backwards(actions) if reduces else {} for actions in schedule.compute]
    lists: list[list[Action]] = [[] for _ in schedule.compute]
    for rank, index in _by_end(schedule, costs):
        action = schedule.compute[rank][index]
        lists[rank] += gather[rank].before[index]
        lists[rank].append(action)
        for part in action.compute_parts:
            product = produced_by(part, schedule.num_stages)
            if product is None:
                continue
            receiver = schedule.stage_to_rank[product.consumer_stage]
            if receiver != rank:
                lists[rank].append(product.send)
                lists[receiver].append(product.receive)
        if index in reduced_after[rank]:
            lists[rank].append(reduced_after[rank][index])
    lowered = LoweredSchedule(
        schedule=schedule,
        actions=tuple((*actions, *gather[rank].after_all) for rank, actions in enumerate(lists)),
    )
    problems = lowered_problems(lowered)
    assert not problems, "\n".join(problems)
    return lowered


def excess_of_bytes(
    schedule: Schedule, *, max_unsharded_bytes: int | None, unsharded_bytes: Mapping[int, int]
) -> list[str]:
    """A sentence for each set of stages that an action uses and whose parameters are too large.

    Arguments are those of ``lower``, which refuses such a schedule.
    """
    limit = _Limit(
        num_stages=schedule.num_stages, num_bytes=max_unsharded_bytes, bytes_of=unsharded_bytes
    )
    return [
        f"an action needs {limit.bytes_together(stages):,} bytes of gathered parameters, of stage "
        + " and stage ".join(map(str, stages))
        for stages in sorted(map(sorted, _used_together(schedule)))
        if not limit.allows(stages)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """Of what a rank holds gathered at any time."""

    num_stages: int
    num_bytes: int | None
    bytes_of: Mapping[int, int]

    def bytes_together(self, stages: Iterable[int]) -> int:
        return sum(self.bytes_of.get(stage, 0) for stage in stages)

    def allows(self, stages: Sequence[int]) -> bool:
        fits = self.num_bytes is None or self.bytes_together(stages) <= self.num_bytes
        return fits and len(stages) <= self.num_stages


def _used_together(schedule: Schedule) -> set[frozenset[int]]:
    return {
        frozenset(part.stage for part in action.compute_parts)
        for actions in schedule.compute
        for action in actions
    }


def _check_limit(schedule: Schedule, limit: _Limit) -> None:
    most = max(map(len, _used_together(schedule)))
    if limit.num_stages < most:
        raise ScheduleError(
            what=f"max_unsharded_stages is {limit.num_stages}",
            problems=[f"{schedule.name} has actions that use {most} stages at once"],
        )
    too_large = excess_of_bytes(
        schedule, max_unsharded_bytes=limit.num_bytes, unsharded_bytes=limit.bytes_of
    )
    if too_large:
        raise ScheduleError(what=f"max_unsharded_bytes is {limit.num_bytes:,}", problems=too_large)


def _by_end(schedule: Schedule, costs: CostModel) -> list[tuple[int, int]]:
    """Rank and index of every compute action, by the time at which it ends.

    Ties, which actions that cost nothing also make, go by how many actions must run before: so what
    an action needs always stands before it, at any costs.
    """
    times = compute_times(schedule.compute, num_stages=schedule.num_stages, costs=costs)
    order = [
        (end, depth, rank, index)
        for rank, (ends, depths) in enumerate(zip(times.ends, times.depths, strict=True))
        for index, (end, depth) in enumerate(zip(ends, depths, strict=True))
    ]
    return [(rank, index) for _, _, rank, index in sorted(order)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unshards:
    before: Sequence[Sequence[Action]]
    """The RESHARD and UNSHARD actions that run before each compute action."""

    after_all: Sequence[Action]


def _unshards_of(actions: Sequence[Action], limit: _Limit) -> _Unshards:
    held: list[int] = []
    before: list[list[Action]] = []
    for order in _orders_of_next_use(actions):
        wanted: list[int] = []
        while len(wanted) < len(order) and limit.allows(order[: len(wanted) + 1]):
            wanted.append(order[len(wanted)])
        dropped = [Action(stage, "RESHARD") for stage in held if stage not in wanted]
        fetched = [stage for stage in wanted if stage not in held]
        held = [stage for stage in held if stage in wanted] + fetched
        before.append([*dropped, *(Action(stage, "UNSHARD") for stage in fetched)])
    return _Unshards(before=before, after_all=[Action(stage, "RESHARD") for stage in held])


def _orders_of_next_use(actions: Sequence[Action]) -> list[list[int]]:
    """At each action, the stages that are still used, that action's own first, by next use."""
    orders: list[list[int]] = []
    order: list[int] = []
    for action in reversed(actions):
        used = list(dict.fromkeys(part.stage for part in action.compute_parts))
        order = used + [stage for stage in order if stage not in used]
        orders.append(order)
    return orders[::-1]


def _last_backwards(actions: Sequence[Action]) -> dict[int, Action]:
    """REDUCE_GRAD actions by the index of the compute action that they follow."""
    last = {
        part.stage: index
        for index, action in enumerate(actions)
        for part in action.compute_parts
        if part.kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
    }
    # An action has one backward at most.
    return {index: Action(stage, "REDUCE_GRAD") for stage, index in last.items()}


# Whether the lists of a lowered schedule fit together; every violation at once.
def lowered_problems(lowered: LoweredSchedule) -> tuple[str, ...]:
    """Everything that is wrong with the lists of a lowered schedule; nothing if it can run.

    The schedule itself is known to be right. Checked: the lists compute what the schedule
    computes; each product that changes ranks is sent once after it was made and received once
    before it is used, and nothing else is; two ranks agree on the order of all transfers between
    them; if a rank gathers parameters, each stage has them wherever it computes, and drops them;
    if it reduces gradients, each stage does so once after its last backward; and ranks never wait
    for each other in a circle, even if every send and receive blocks.
    """
    schedule = lowered.schedule
    if lowered.num_ranks != schedule.num_ranks:
        return (f"there are lists of {lowered.num_ranks} ranks, not of {schedule.num_ranks}",)
    problems: list[str] = []
    for rank, actions in enumerate(lowered.actions):
        if tuple(each for each in actions if each.is_compute) != schedule.compute[rank]:
            problems.append(f"rank {rank} does not compute what the schedule says")
        problems += [f"rank {rank}: {problem}" for problem in _in_one_list(schedule, rank, actions)]
    if not problems:
        problems += _transfer_orders(lowered)
    if problems:
        return tuple(problems)  # ranks would be stuck for these reasons
    return RankLists(
        schedule.stage_to_rank,
        lowered.actions,
        UNIT_COSTS,
        blocking_transfers=True,
        blocking_gathers=True,
    ).run()


def _in_one_list(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Iterator[str]:
    for action, count in Counter(actions).items():
        if count > 1 and action.kind not in ("UNSHARD", "RESHARD"):
            yield f"{action} stands {count} times in the list"
    yield from _transfers_of(schedule, rank, actions)
    if any(each.kind in ("UNSHARD", "RESHARD") for each in actions):
        yield from _unshards_checked(actions)
    if any(each.kind == "REDUCE_GRAD" for each in actions):
        yield from _reductions_of(schedule, rank, actions)


def _transfers_of(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Iterator[str]:
    sent: dict[Product, int] = {}
    received: dict[Product, int] = {}
    for index, action in enumerate(actions):
        if action.is_point_to_point:
            (sent if action.is_send else received)[transferred_by(action)] = index
    for index, action in enumerate(actions):
        for part in action.compute_parts:
            made = produced_by(part, schedule.num_stages)
            leaves = made is not None and schedule.stage_to_rank[made.consumer_stage] != rank
            if made is not None and leaves and sent.pop(made, -1) < index:
                yield f"{made.send} is missing after {action}"
            taken = consumed_by(part, schedule.num_stages)
            arrives = taken is not None and schedule.stage_to_rank[taken.stage] != rank
            if taken is not None and arrives and received.pop(taken, len(actions)) > index:
                yield f"{taken.receive} is missing before {action}"
    for index in sorted([*sent.values(), *received.values()]):
        yield f"{actions[index]} moves nothing that has to change ranks"


def _unshards_checked(actions: Sequence[Action]) -> Iterator[str]:
    gathered: set[int] = set()
    for action in actions:
        match action.kind:
            case "UNSHARD":
                if action.stage in gathered:
                    yield f"{action} gathers what is already there"
                gathered.add(action.stage)
            case "RESHARD":
                if action.stage not in gathered:
                    yield f"{action} drops what is not there"
                gathered.discard(action.stage)
            case _:
                for part in action.compute_parts:
                    if part.stage not in gathered:
                        yield f"{part} runs without its parameters: no {part.stage}UNSHARD before"
    for stage in sorted(gathered):
        yield f"{stage}RESHARD is missing at the end"


def _reductions_of(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Iterator[str]:
    place = {action: index for index, action in enumerate(actions)}
    for stage in schedule.stages_of_rank(rank):
        last = max(
            (
                index
                for index, action in enumerate(actions)
                for part in action.compute_parts
                if part.stage == stage and part.kind != "FORWARD"
            ),
            default=-1,
        )
        reduction = Action(stage, "REDUCE_GRAD")
        if place.get(reduction, -1) < last:
            yield f"{reduction} is missing after {actions[last]}, the stage's last backward"


def _transfer_orders(lowered: LoweredSchedule) -> Iterator[str]:
    stage_to_rank = lowered.schedule.stage_to_rank
    orders: dict[tuple[int, int], list[Product]] = defaultdict(list)
    for rank, actions in enumerate(lowered.actions):
        for action in actions:
            if action.is_point_to_point:
                moved = transferred_by(action)
                sender, receiver = stage_to_rank[moved.stage], stage_to_rank[moved.consumer_stage]
                orders[rank, receiver if rank == sender else sender].append(moved)
    for (rank, other), order in sorted(orders.items()):
        if rank > other:
            continue
        for place, (one, another) in enumerate(zip(order, orders[other, rank], strict=True)):
            if one != another:
                yield (
                    f"transfer {place} between ranks {rank} and {other} is {one.send} for one "
                    f"and {another.send} for the other"
                )
                break
