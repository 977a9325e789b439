"""What the workers of ``test_schedule_ep_overlap.py`` run: a step in chunks, then scheduled."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from ep_overlap.chunked_graphs import step
from pass_graphs import capture, run_pass

from gt_passes import ScheduleEpOverlap
from gt_passes.ep_overlap import exposed_exchanges


def outputs_before_and_after(
    num_chunks: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What this rank's step returns, as captured and once the chunks take turns."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    rows = 4 * num_chunks
    inputs = (torch.randn(rows, 8), torch.randn(rows, 8))
    graph_module = capture(
        lambda x, dy: step(x, dy, num_chunks, group=group.group_name, num_ranks=group.size()),
        *inputs,
    )
    before = copy.deepcopy(graph_module)(*inputs)
    assert run_pass(ScheduleEpOverlap(), graph_module).changed
    assert exposed_exchanges(graph_module) == ()
    return before, graph_module(*inputs)
