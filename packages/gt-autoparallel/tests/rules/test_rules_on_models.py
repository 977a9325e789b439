"""Rules hold for the calls that real models make: each node, on the values it gets there.

The models are transformers', which know nothing of us. Every operator of their forward and backward
has a rule; a spread of the options of each runs on simulated ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_ranks import Sample, wrong_options
from torch import nn
from torch.utils import _pytree as pytree
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.rules import check_operators

MESH = MeshShape(names=("dp", "tp"), sizes=(2, 2))
VOCABULARY, BATCH, TOKENS = 32, 4, 8
_ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def gpt2() -> nn.Module:
    """Learned positions, a projection with bias, weights that are transposed, tied embeddings."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=4, n_positions=16, use_cache=False,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_ROTARY, attn_implementation="sdpa"))


def qwen2() -> nn.Module:
    """Biases on queries, keys and values; attention written out."""
    return Qwen2ForCausalLM(Qwen2Config(**_ROTARY, attn_implementation="eager"))


class WithLoss(nn.Module):
    """The model's own mean loss, with samples that do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


@pytest.mark.parametrize("build", [gpt2, llama, qwen2])
def test_every_call_of_a_model_is_right_on_every_rank(build: Any) -> None:
    torch.manual_seed(0)
    model = WithLoss(build())
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    labels = tokens.clone()
    labels[0, :3] = -100
    graph = capture_placement_graph(model, (tokens, labels))
    check_operators(graph)
    calls = _calls(graph, _tensors(graph, model, [tokens, labels]))
    assert len(calls) > 60
    assert [problem for call in calls for problem in wrong_options(call, MESH, at_most=4)] == []


def _tensors(
    graph: PlacementGraph, model: nn.Module, inputs: list[torch.Tensor]
) -> dict[int, torch.Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = iter(inputs)
    tensors = {}
    for node in graph.nodes:
        if node.kind in ("parameter", "buffer"):
            tensors[node.index] = state[str(node.target)].detach()
        elif node.kind == "input":
            tensors[node.index] = next(given)
        elif node.kind == "tangent":
            tensors[node.index] = torch.ones(graph.spec(Value(node.index)).shape)
    return tensors


@torch.no_grad()
def _calls(graph: PlacementGraph, tensors: dict[int, torch.Tensor]) -> list[Sample]:
    """Each operator with what it is given when the graph runs whole; alike calls once."""
    values: dict[Value, Any] = {Value(index): tensor for index, tensor in tensors.items()}
    calls: dict[str, Sample] = {}

    def filled(tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, Value) else leaf, tree)

    for node in graph.nodes:
        if node.kind == "share":
            values[Value(node.index)] = values[node.operands[0]]
        if node.kind != "operator":
            continue
        sample = Sample(
            operator=str(node.target),
            args=filled(node.args),
            kwargs=filled(node.kwargs),
            exact=False,
            compared=None,
            stand_in=None,
        )
        for position, output in enumerate(sample.run(node.target, sample.args, sample.kwargs)):
            values[Value(node.index, position)] = output
        calls.setdefault(_signature(graph, node), sample)
    return list(calls.values())


def _signature(graph: PlacementGraph, node: PlacementNode) -> str:
    shapes = [graph.spec(value).shape for value in node.operands]
    constants = pytree.tree_map(
        lambda leaf: "tensor" if isinstance(leaf, Value) else leaf, (node.args, node.kwargs)
    )
    return f"{node.target} {shapes} {constants}"
