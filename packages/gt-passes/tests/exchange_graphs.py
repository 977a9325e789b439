"""Graphs with the token exchange of expert parallelism, whose sizes depend on data."""

from __future__ import annotations

import torch
from pass_graphs import collectives
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gt_passes._torch_internals import FakeTensorMode

NUM_RANKS = 4


def capture_exchange(
    *, rows: int = 64, width: int = 8, group: str = "ep", static_shapes: bool = True
) -> GraphModule:
    """Rows go out to ranks in numbers that data decide, are doubled there, and come back.

    Args:
        rows: that this rank sends.
        width: of each row, in float32.
        group: name of the group, of ``NUM_RANKS`` ranks.
        static_shapes: whether the shapes of the inputs are numbers in the graph.
    """

    def exchange(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sent = [rows // NUM_RANKS] * NUM_RANKS
        received = counts.tolist()
        for count in received:
            torch._check(count >= 0)
        there = collectives.wait_tensor(collectives.all_to_all_single(x, received, sent, group))
        done = there * 2
        return collectives.wait_tensor(collectives.all_to_all_single(done, sent, received, group))

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = (torch.ones(rows, width), torch.ones(NUM_RANKS, dtype=torch.int64))
    with mode:
        fakes = [mode.from_tensor(tensor, static_shapes=static_shapes) for tensor in inputs]
        return make_fx(exchange)(*fakes)
