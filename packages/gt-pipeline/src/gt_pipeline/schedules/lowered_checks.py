"""Whether the lists of a lowered schedule fit together; every violation at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.costs import UNIT_COSTS
from gt_pipeline.schedules.dependencies import Product, consumed_by, produced_by, transferred_by
from gt_pipeline.schedules.rank_lists import RankLists
from gt_pipeline.schedules.schedule import LoweredSchedule, Schedule


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
        yield from _unshards_of(actions)
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


def _unshards_of(actions: Sequence[Action]) -> Iterator[str]:
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
