"""What the workers of ``test_collective_exchange.py`` run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pass_graphs import capture, collectives
from torch.fx import GraphModule

from gt_passes.collective_exchange import exchange_collective_digest
from gt_passes.errors import CollectiveMismatchError


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
