"""Operators of a captured step are counted under the layers that they belong to."""

from __future__ import annotations

import torch
from torch import nn

from gt_trace import phase, trace_step
from gt_trainer.steps.layer_counts import layer_counts


def test_operators_are_counted_by_layer_and_phase():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()) for _ in range(2))
    model = nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(4, bias=False)})

    def step(x: torch.Tensor):
        for layer in layers:
            x = layer(x)
        x = model["norm"](x)
        with phase("loss"):
            loss = x.sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    graph_module = trace_step(step, module=model)(torch.rand(2, 4)).graph_module
    counts = layer_counts(graph_module)
    assert [*counts] == ["layers.0", "layers.1", "norm", "(loss)", "(backward)"]
    assert counts["layers.0"]["forward"] == counts["layers.1"]["forward"] == 4
    assert counts["(loss)"] == {"loss": 2}
    num_operators = sum(
        node.op not in ("placeholder", "output") for node in graph_module.graph.nodes
    )
    assert sum(sum(each.values()) for each in counts.values()) == num_operators
