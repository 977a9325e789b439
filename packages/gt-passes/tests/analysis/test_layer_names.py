"""Which layer a node belongs to."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import capture

from gt_config.node_keys import ModuleAnnotation
from gt_passes.analysis.layer_names import LayerNames
from gt_trace.annotate import annotate


@pytest.mark.parametrize(
    ("pattern", "fqn", "layer"),
    [
        ("layers.*", "layers.3", "layers.3"),
        ("layers.*", "layers.3.attention.wq", "layers.3"),
        ("layers.*", "layers", None),
        ("layers.*", "norm.0", None),
        ("layers.*", "", None),
        ("model.layers.*", "model.layers.12.mlp", "model.layers.12"),
        ("layers.1*", "layers.12", "layers.12"),
        ("layers.1*", "layers.2", None),
    ],
)
def test_a_layer_is_what_the_pattern_matches(pattern: str, fqn: str, layer: str | None):
    assert LayerNames(pattern).layer_of_name(fqn) == layer


def test_nodes_belong_to_the_layer_of_their_module():
    def step(x):
        with annotate(ModuleAnnotation(fqn="layers.7.norm")):
            y = x.cos()
        return y.sin()

    graph = capture(step, torch.ones(2)).graph
    names = LayerNames()
    layers = {node.name: names.layer_of(node) for node in graph.nodes if node.op != "output"}
    assert layers == {"x_1": None, "cos": "layers.7", "sin": None}
