"""What may run again in the backward: a layer's own work, by operators that give the same twice."""

from __future__ import annotations

import torch
from planned_models import Residual
from torch import nn

from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.prices.recomputability import recomputable_nodes
from gt_autoparallel.prices.saved_storages import saved_storages


def captured(model: nn.Module, *shape: int, **allowed: list[str]) -> PlacementGraph:
    with torch.device("meta"):
        x = torch.empty(*shape)
    return capture_placement_graph(model.to("meta"), (x,), {}, **allowed)


def names(graph: PlacementGraph) -> list[str]:
    return [graph.nodes[index].name for index in sorted(recomputable_nodes(graph))]


def test_a_layer_runs_its_own_work_again_and_gathers_its_parameters_again() -> None:
    with torch.device("meta"):
        graph = captured(Residual(), 8, 512)
    found = [name for name in names(graph) if name.startswith("layers.1")]
    assert found == [
        "layers.1.up.weight/share",
        "layers.1.down.weight/share",
        "layers.1.up/t",
        "layers.1.up/t/share",
        "layers.1.up/mm",
        "layers.1.up/mm/share",
        "layers.1/silu",
        "layers.1/silu/share",
        "layers.1.down/t",
        "layers.1.down/t/share",
        "layers.1.down/mm",
    ]


def test_what_another_layer_reads_is_kept() -> None:
    with torch.device("meta"):
        graph = captured(Residual(), 8, 512)
    assert not [name for name in names(graph) if name.startswith("layers.1/add")]


class Chosen(nn.Module):
    """Random numbers and the choice of the largest, both of which the backward asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + (torch.bernoulli(y.detach().sigmoid()) * y).sin()
        return x.topk(4, dim=-1).values.sin()


def test_random_numbers_and_decisions_are_kept() -> None:
    graph = captured(Chosen(), 8, 16, allowed_random_operators=["aten.bernoulli.default"])
    operators = {str(graph.nodes[index].target) for index in recomputable_nodes(graph)}
    assert {str(n.target) for n in graph.nodes} >= {"aten.bernoulli.default", "aten.topk.default"}
    assert operators.isdisjoint({"aten.bernoulli.default", "aten.topk.default"})


def test_what_may_be_recomputed_is_kept_or_made_of_what_can_be_there() -> None:
    with torch.device("meta"):
        graph = captured(Residual(), 8, 512)
    statuses = {
        graph.nodes[index].name: each
        for index, each in saved_storages(graph, recomputes=True).statuses.items()
    }
    assert statuses["layers.1.up/mm/share"] == ("moved", "aliased", "recomputed")
    assert statuses["layers.1.up/mm"] == ("idle", "kept", "recomputed")
    assert statuses["layers.1.down.weight/share"] == ("idle", "moved", "aliased", "recomputed")
    # The sum is read by the next layer.
    assert statuses["layers.1/add"] == ("idle", "kept")
