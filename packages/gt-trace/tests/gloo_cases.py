"""What the workers of ``test_gloo.py`` run."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gt_trace import trace_step

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


def wait_in_vain() -> list[str]:
    """The notes of the error that rank 0 gets where rank 1 never joins its captured all-reduce."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))

    def step(x: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", group.group_name)) + 1

    bound = trace_step(step)(torch.ones(2)).bind()
    if dist.get_rank() == 1:
        return []
    try:
        bound(torch.ones(2))
    except RuntimeError as error:
        return error.__notes__
    raise AssertionError("an all-reduce of one rank ended")
