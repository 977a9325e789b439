"""The sweep replaces nodes by earlier ones, and later nodes see that at once."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, program

from gt_passes.analysis.forward_sweep import ForwardSweep

X = torch.ones(3)


def test_later_nodes_see_their_final_inputs():
    graph_module = capture(lambda x: (x.cos().neg().neg().sin(), x.sin()), X)
    sweep = ForwardSweep(graph_module.graph)
    seen = []
    for node in sweep:
        seen.append((node.name, [argument.name for argument in node.all_input_nodes]))
        if node.target is torch.ops.aten.neg.default:
            sweep.replace(node, by=node.args[0])
    assert seen[2:5] == [("neg", ["cos"]), ("neg_1", ["cos"]), ("sin", ["cos"])]
    assert sweep.num_replaced == 2
    assert_expected_inline(
        program(graph_module),
        """\
cos = aten.cos.default(x_1)
sin = aten.sin.default(cos)
sin_1 = aten.sin.default(x_1)
return [sin, sin_1]
""",
    )


def test_a_replaced_node_replaces_nothing():
    graph_module = capture(lambda x: x.cos().neg().sin(), X)
    sweep = ForwardSweep(graph_module.graph)
    _, cos, neg, sin, _ = sweep
    sweep.replace(neg, by=cos)
    with pytest.raises(AssertionError, match="neg is replaced itself"):
        sweep.replace(sin, by=neg)
