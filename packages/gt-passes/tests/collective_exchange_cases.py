"""What the workers of ``test_collective_exchange.py`` run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pass_graphs import capture, collectives
from torch.fx import GraphModule

from gt_passes.errors import CollectiveMismatchError
from gt_passes.second_groups import second_group_of
from gt_passes.verifier.collective_exchange import exchange_collective_digest


def two_collectives(*, swapped: bool = False) -> GraphModule:
    name = dist.group.WORLD.group_name
    num_ranks = dist.get_world_size()

    def gather(x):
        return collectives.wait_tensor(collectives.all_gather_into_tensor(x, num_ranks, name))

    def reduce(x):
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", name))

    def step(x):
        first, second = (gather, reduce) if swapped else (reduce, gather)
        return first(x), second(x)

    return capture(step, torch.ones(4))


def agreed_digest() -> str:
    return exchange_collective_digest(two_collectives())


def error_when_some_differ(differing: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    try:
        exchange_collective_digest(two_collectives(swapped=dist.get_rank() in differing))
    except CollectiveMismatchError as error:
        return str(error), error.ranks
    raise AssertionError("nobody noticed")


def digests_of_two_stages() -> str:
    """Ranks 0 and 1 run one graph, 2 and 3 another, and only compare among themselves."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    return exchange_collective_digest(two_collectives(swapped=stage == 1), stages[stage])


def sums_over_second_groups() -> tuple[bool, bool, bool, float]:
    """Of a pair of ranks: whether its second groups for two purposes are new, the same when asked
    for again, and of the same ranks; and a sum over one."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    first = pairs[dist.get_rank() % 2].group_name
    second = second_group_of(first, purpose="reductions")
    other = second_group_of(first, purpose="exchanges")
    ranks = [
        dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))
        for name in (first, second, other)
    ]
    total = collectives.wait_tensor(
        collectives.all_reduce(torch.full((), float(dist.get_rank())), "sum", second)
    )
    again = second_group_of(first, purpose="reductions")
    return (
        len({first, second, other}) == 3,
        again == second,
        ranks[0] == ranks[1] == ranks[2],
        total.item(),
    )
