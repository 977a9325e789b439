"""What the workers of ``test_gloo.py`` run."""

from __future__ import annotations

import torch
import torch.distributed as dist

collectives = torch.ops._c10d_functional


def describe_groups() -> tuple[str, list[int], int]:
    """Backend and ranks of a new group, and its threads for collectives."""
    group = dist.new_group([0, 1])
    options = group._get_backend(torch.device("cpu")).options  # nothing public tells
    return dist.get_backend(group), dist.get_process_group_ranks(group), options._threads


def overlap(num_rounds: int) -> float:
    """Eight small collectives at a time, again and again."""
    name = dist.group.WORLD.group_name
    total = torch.zeros(())
    for _ in range(num_rounds):
        launched = [collectives.all_reduce(torch.ones(2), "sum", name) for _ in range(8)]
        total = collectives.wait_tensor(launched[0])[0]
        for result in launched[1:]:
            collectives.wait_tensor(result)
    return total.item()
