"""A graph that was scanned can be made again after it was edited."""

from __future__ import annotations

import torch
from pass_graphs import capture, node_of, program

from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.verifier.verification_session import made_again


def test_the_graph_before_an_edit_is_made_again_with_its_values():
    graph_module = capture(lambda x: (x.cos().sin(), x.exp()), torch.ones(4, 6))
    before, values = program(graph_module), [n.meta.get("val") for n in graph_module.graph.nodes]
    scan = GraphScanner().scan(graph_module)
    sin = node_of(graph_module, "sin")
    sin.target, sin.meta["val"] = torch.ops.aten.tan.default, sin.meta["val"].double()
    sin.args = (node_of(graph_module, "exp"),)
    assert program(graph_module) != before
    again = made_again(scan)
    assert program(again) == before
    assert [id(node.meta.get("val")) for node in again.graph.nodes] == list(map(id, values))
