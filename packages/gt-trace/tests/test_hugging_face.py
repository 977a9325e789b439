"""A Hugging Face Llama, which knows nothing of us, is captured as it is."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gt_trace import module_fqn, trace_step


def test_transformers_llama_equals_eager_bitwise_on_another_batch() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight

    def step(tokens: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = model(input_ids=tokens, attention_mask=attention_mask, labels=labels).loss
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    def batch(seed: int, padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (2, 16), generator=generator)
        mask = torch.ones(2, 16, dtype=torch.long)
        mask[0, :padding] = 0
        return tokens, mask, tokens

    # Padded batches only: without padding transformers looks at the mask's values and calls
    # another attention kernel, eagerly; a capture keeps the mask and rounds differently there.
    traced = trace_step(step, module=model)(*batch(1, 1))
    fqns = {module_fqn(node) for node in traced.graph_module.graph.nodes}
    assert {"model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"} <= fqns
    bound = traced.bind(model)
    for inputs in (batch(2, 2), batch(3, 5)):
        loss, gradients = bound(*inputs)
        expected_loss, expected = step(*inputs)
        assert torch.equal(loss, expected_loss)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert torch.equal(mine, theirs)
