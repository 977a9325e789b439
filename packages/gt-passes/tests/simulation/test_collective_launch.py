"""What a launch moves: an all-to-all with one part is a send to one other rank."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.simulation.cost_model import collective_launch


@pytest.mark.parametrize(
    ("taken_from", "to", "kind"),
    [
        ([0, 8, 0], [8, 0, 0], "send_receive"),
        ([4, 4, 0], [8, 0, 0], "all_to_all"),
        ([0, 8, 0], [4, 0, 4], "all_to_all"),
        ([3, 3, 2], [2, 3, 3], "all_to_all"),
    ],
)
def test_a_permutation_is_priced_as_the_sends_that_it_is(
    taken_from: list[int], to: list[int], kind: str
) -> None:
    graph = Graph()
    row = graph.placeholder("row")
    row.meta["val"] = torch.empty(8)
    sent = graph.call_function(
        torch.ops._c10d_functional.all_to_all_single.default, (row, taken_from, to, "ring")
    )
    sent.meta["val"] = torch.empty(8)
    launch = collective_launch(sent, SymbolSizes())
    assert (launch.kind, launch.num_bytes, launch.group_name) == (kind, 32, "ring")
