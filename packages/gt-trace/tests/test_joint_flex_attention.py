"""FlexAttention in joint graphs: its operators survive the cut, and so do the tags on them.

Whoever compiles regions with Inductor finds them by a tag (``compile_with_inductor`` in PyTorch's
own regional compilation). Captured for the CPU, whose FlexAttention has no backward kernel: the
operator itself is called, as ``flex_attention`` does under a compiler, and nothing is run.
"""

from __future__ import annotations

import pytest
import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx import GraphModule, Node

from gt_config.node_keys import ModuleAnnotation
from gt_trace import ForwardBackward, annotate, export_joint_graph, node_annotations, partition

OPTIONS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def distance(
    score: torch.Tensor,
    batch: torch.Tensor,
    head: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    return score + (query - key) * 0.1


def every_key(
    batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return query == query


class Attention(nn.Module):
    """Self-attention of two heads; x is (B, L, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        one = x.new_ones(1, 1, 1, dtype=torch.int32)
        first = x.new_zeros(1, 1, 1, 1, dtype=torch.int32)
        blocks = (one, first, None, None, one, first, None, None, None, None, None, None)
        mask = (128, 128, *blocks, 128, 128, every_key)
        with (
            annotate(ModuleAnnotation(fqn="attention")),
            fx_traceback.annotate({"compile_with_inductor": "flex_attention"}),
        ):
            out, *_ = flex_attention(q, k, v, distance, mask, 0.35, OPTIONS)
        return out.transpose(1, 2).flatten(2)


@pytest.fixture(scope="module", params=["min_cut", "save_all"])
def parts(request: pytest.FixtureRequest) -> ForwardBackward:
    with torch.device("meta"):
        module, x = Attention(), torch.empty(2, 128, 16)
    joint = export_joint_graph(module, (x,), meta_device="cpu")
    return partition(joint, partitioner=request.param)


def attention_of(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if "flex_attention" in str(node.target)]


def test_each_graph_has_its_operator_with_the_tag(parts: ForwardBackward) -> None:
    (forward,), (backward,) = attention_of(parts.forward), attention_of(parts.backward)
    assert str(forward.target) == "flex_attention"
    assert str(backward.target) == "flex_attention_backward"
    for node in (forward, backward):
        assert node_annotations(node)["compile_with_inductor"] == "flex_attention"


def test_score_and_mask_functions_are_there_in_each_graph(parts: ForwardBackward) -> None:
    for graph_module in (parts.forward, parts.backward):
        (node,) = attention_of(graph_module)
        functions = [each for each in node.all_input_nodes if each.op == "get_attr"]
        assert len(functions) >= 2
        for function in functions:
            assert isinstance(getattr(graph_module, str(function.target)), GraphModule)


def test_the_backward_operator_is_of_the_forward_operators_module(parts: ForwardBackward) -> None:
    (backward,) = attention_of(parts.backward)
    assert node_annotations(backward)[ModuleAnnotation.KEY] == {"fqn": "attention"}
