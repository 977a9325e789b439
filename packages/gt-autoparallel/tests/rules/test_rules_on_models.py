"""Rules hold for the calls that real models make: each node, on the values it gets there.

The models are transformers', which know nothing of us. Every operator of their forward and backward
has a rule; a spread of the options of each runs on simulated ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls_of_graph import calls_of_graph
from simulated_ranks import wrong_options
from torch import nn
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
    calls = calls_of_graph(graph, model, (tokens, labels))
    assert len(calls) > 60
    assert [problem for call in calls for problem in wrong_options(call, MESH, at_most=4)] == []
