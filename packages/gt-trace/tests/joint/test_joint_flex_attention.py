"""FlexAttention in joint graphs: its operators survive the cut, and so do the tags on them.

Whoever compiles regions with Inductor finds them by a tag (``compile_with_inductor`` in PyTorch's
own regional compilation). The operator itself is called there, as ``flex_attention`` does under a
compiler, and nothing is run.

What runs are models that compile ``flex_attention`` and take a mask with the batch. It refuses CPU
tensors that require a gradient; without that refusal, captured graphs and eager execution run the
same dense implementation, and can be compared to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.fx.traceback as fx_traceback
import torch.nn.attention.flex_attention as public
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

from gt_config.node_keys import ModuleAnnotation
from gt_trace import InputMismatchError, annotate, flex_attention_on_cpu
from gt_trace.joint import ForwardBackward, export_joint_graph, partition
from gt_trace.joint.bound_joint import BoundJoint
from gt_trace.node_metadata import node_annotations

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
        mask = BlockMask(
            (128, 128), one, first, None, None, one, first, None, None, (128, 128), every_key
        ).as_tuple()
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


# ---- models that compile it, and take a mask with the batch -------------------------------------

LENGTH, BLOCK = 64, 32

compiled_flex_attention = torch.compile(public.flex_attention)


class Layer(nn.Module):
    """Self-attention of two heads; x is (B, L, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = compiled_flex_attention(q, k, v, block_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, *, mask: BlockMask) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def mask_of(documents: Tensor) -> BlockMask:
    """Causal within documents; (B, L) numbers of documents."""

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    shape = (len(documents), None, LENGTH, LENGTH)
    return create_block_mask(and_masks(causal, same), *shape, device="cpu", BLOCK_SIZE=BLOCK)


def batch(seed: int) -> tuple[Tensor, BlockMask]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(2, LENGTH, generator=generator) < 0.1
    return torch.randn(2, LENGTH, 16, generator=generator), mask_of(starts.int().cumsum(1))


@pytest.fixture(scope="module", autouse=True)
def without_device_check() -> Iterator[None]:
    """See the top of this file."""
    with flex_attention_on_cpu():
        yield


@pytest.fixture(scope="module", params=["min_cut", "save_all"])
def bound(request: pytest.FixtureRequest, without_device_check: None) -> tuple[Decoder, BoundJoint]:
    torch.manual_seed(0)
    module = Decoder()
    x, mask = batch(0)
    joint = export_joint_graph(module, (x,), {"mask": mask})
    return module, partition(joint, partitioner=request.param).bind(module)


def test_a_compiled_operator_is_part_of_the_graphs(bound: tuple[Decoder, BoundJoint]) -> None:
    parts = bound[1].parts
    forward, backward = attention_of(parts.forward), attention_of(parts.backward)
    assert [str(node.target) for node in forward] == ["flex_attention"] * 2
    assert [str(node.target) for node in backward] == ["flex_attention_backward"] * 2
    names = [each.name for each in parts.forward_inputs if each.kind == "argument"]
    assert "mask.kv_indices" in names
    assert "mask._closure_0" in names, "what the mask's function closes over comes with the batch"


def test_bits_are_those_of_eager_with_the_documents_of_another_batch(
    bound: tuple[Decoder, BoundJoint],
) -> None:
    module, captured = bound
    x, mask = batch(1)
    mine = _loss_and_gradients(captured, module, x, mask)
    with torch.compiler.set_stance("force_eager"):
        theirs = _loss_and_gradients(module, module, x, mask)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    captured_mask = batch(0)[1]
    assert not torch.equal(mine[0], captured(x, mask=captured_mask).square().mean())


def _loss_and_gradients(
    call: Decoder | BoundJoint, module: Decoder, x: Tensor, mask: BlockMask
) -> tuple[Tensor, ...]:
    loss = call(x, mask=mask).square().mean()
    return (loss, *torch.autograd.grad(loss, list(module.parameters())))


def test_a_mask_of_another_function_is_refused(bound: tuple[Decoder, BoundJoint]) -> None:
    x, _ = batch(0)
    other = create_block_mask(causal, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    with pytest.raises(InputMismatchError) as caught:
        bound[1](x, mask=other)
    assert (
        "mask: BlockMask with mask_mod causal, captured with "
        "and_masks.<locals>.and_mask(causal, mask_of.<locals>.same)"
    ) in str(caught.value)
