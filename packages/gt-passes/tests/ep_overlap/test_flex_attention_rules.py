"""FlexAttention runs chunk by chunk where its functions only look a sample's own values up.

On the CPU, of which FlexAttention refuses tensors that need a gradient: its operator's dense
implementation, forward and backward, is for all devices, and runs here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from gt_passes.ep_overlap import chunk_graph
from gt_passes.errors import GraphChunkingError
from gt_trace import TracedStep, flex_attention_on_cpu, trace_step

BATCH, LENGTH = 5, 32

ScoreFunction = Callable[..., torch.Tensor]


class Layer(nn.Module):
    """Self-attention of two heads."""

    def __init__(self, score: ScoreFunction | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.score = score

    def forward(self, x_BLD: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        q, k, v = self.qkv(x_BLD).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        out = flex_attention(q, k, v, score_mod=self.score, block_mask=mask)
        return x_BLD + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, score: ScoreFunction | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(score), Layer(score)])

    def forward(self, x_BLD: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        for layer in self.layers:
            x_BLD = layer(x_BLD, mask)
        return x_BLD


def causal(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return q >= k


def documents_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(BATCH, LENGTH, generator=generator) < 0.2).int().cumsum(1)


def mask_of(function: Callable[..., torch.Tensor], batch: int | None = BATCH) -> BlockMask:
    return create_block_mask(function, batch, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def same_document(documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    def function(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return documents[b, q] == documents[b, k]

    return and_masks(causal, function)


def capture(model: nn.Module, mask: BlockMask) -> TracedStep:
    def step(x: torch.Tensor, mask: BlockMask) -> list[torch.Tensor]:
        loss = model(x, mask).square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    return trace_step(step, module=model)(torch.randn(BATCH, LENGTH, 8), mask)


def chunk(step: TracedStep, num_chunks: int = 2) -> None:
    chunk_graph(
        step.graph_module,
        patterns=["layers.*"],
        fake_mode=step.fake_mode,
        num_static_inputs=step.num_static_inputs,
        num_chunks=num_chunks,
    )
    step.graph_module.recompile()


@pytest.fixture(scope="module", autouse=True)
def _cpu_trains() -> Iterator[None]:
    with flex_attention_on_cpu():
        yield


@pytest.fixture(scope="module")
def model(_cpu_trains: None) -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_of_packed_documents_give_what_the_whole_batch_gives(
    model: Model, num_chunks: int
) -> None:
    step = capture(model, mask_of(same_document(documents_of(0))))
    whole = replace(step, graph_module=copy.deepcopy(step.graph_module)).bind(model)
    chunk(step, num_chunks)
    chunked = step.bind(model)
    operators = [str(node.target) for node in step.graph_module.graph.nodes]
    assert operators.count("flex_attention") == 2 * num_chunks
    assert operators.count("flex_attention_backward") == 2 * num_chunks
    for seed in range(2):
        x, documents = torch.randn(BATCH, LENGTH, 8), documents_of(seed)
        expected = whole(x, mask_of(same_document(documents)))
        for want, have in zip(expected, chunked(x, mask_of(same_document(documents))), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)
        # Samples have masks of their own, or it would not matter which one a chunk looks up.
        other = whole(x, mask_of(same_document(documents.roll(1, dims=0))))
        assert not torch.allclose(other[1], expected[1], rtol=1e-3)


def test_a_mask_for_all_samples_is_given_to_every_chunk(model: Model) -> None:
    step = capture(model, mask_of(causal, batch=None))
    whole = replace(step, graph_module=copy.deepcopy(step.graph_module)).bind(model)
    chunk(step)
    x, mask = torch.randn(BATCH, LENGTH, 8), mask_of(causal, batch=None)
    for want, have in zip(whole(x, mask), step.bind(model)(x, mask), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


def refusal(model: nn.Module, mask: BlockMask) -> str:
    with pytest.raises(GraphChunkingError) as error:
        chunk(capture(model, mask))
    lines = str(error.value).splitlines()
    assert "(flex_attention) in the forward of layers.0: " in lines[1]
    return lines[1].split("layers.0: ", 1)[1]


def test_refuses_a_mask_that_computes_with_the_number_of_a_sample(model: Model) -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q >= k) | (b == 0)

    assert refusal(model, mask_of(function)) == (
        "its mask function uses the number of a sample for other things than to look it up in a "
        "tensor of the batch: aten.eq.Scalar"
    )


def test_refuses_a_mask_that_looks_at_other_samples(model: Model) -> None:
    documents = documents_of(0)

    def function(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return documents[b, q] == documents[h, k]

    assert refusal(model, mask_of(function)).startswith("its mask function reads ")
    assert refusal(model, mask_of(function)).endswith(" for its own sample, and for others")


def test_refuses_a_mask_that_reads_a_tensor_of_the_batch_as_one_of_all(model: Model) -> None:
    offsets = torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def function(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return q >= k + offsets[h, k]

    assert refusal(model, mask_of(function)) == (
        "its mask function reads a_mask__closure_0, of which each chunk has a part"
    )


def test_refuses_scores_that_depend_on_the_number_of_a_sample() -> None:
    model = Model(lambda score, b, h, q, k: score + b)
    assert refusal(model, mask_of(causal)) == (
        "its score function uses the number of a sample: aten.add.Tensor"
    )
