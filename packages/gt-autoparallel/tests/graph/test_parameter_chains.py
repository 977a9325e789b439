"""What stands between parameters and their users, and before gradients."""

from __future__ import annotations

import torch
from torch import nn

from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains, summed_later
from gt_autoparallel.graph.placement_graph import PlacementGraph


class Normalized(nn.Module):
    """A product, whose gradient is transposed, and a scale that is computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.empty(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y.float() * self.scale.float()).to(y.dtype)


def captured() -> PlacementGraph:
    with torch.device("meta"):
        model = Normalized()
    x = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    return capture_placement_graph(model, (x,), compute_dtype=torch.bfloat16)


def test_a_gradient_begins_before_the_views_and_casts_that_lead_to_it() -> None:
    graph = captured()
    assert sorted(set(parameter_chains(graph).values())) == ["linear.weight", "scale"]
    of_linear = [n for n, name in gradient_chains(graph).items() if name == "linear.weight"]
    kinds = [str(graph.nodes[index].target) for index in sorted(of_linear)]
    assert kinds == ["aten.t.default", "aten.t.default", "aten._to_copy.default", "linear.weight"]


def test_gradients_are_summed_behind_the_cast_to_a_wider_dtype() -> None:
    """But before one to a narrower dtype, which would round each rank's summand."""
    graph = captured()
    barred = summed_later(graph)
    of: dict[str, list[tuple[str, bool]]] = {"linear.weight": [], "scale": []}
    for index, name in gradient_chains(graph).items():
        of[name].insert(0, (str(graph.nodes[index].target), index in barred))
    assert of["linear.weight"] == [
        ("aten.t.default", True),
        ("aten.t.default", True),
        ("aten._to_copy.default", True),
        ("linear.weight", False),
    ]
    assert of["scale"] == [
        ("aten.view.default", False),
        ("aten._to_copy.default", True),
        ("aten._to_copy.default", True),
        ("scale", False),
    ]
