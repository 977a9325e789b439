"""Samples of FlexAttention: small models that attend by it, captured, and run on whole values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from calls_of_graph import calls_of_graph
from simulated_ranks import Sample
from torch import nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from gt_autoparallel.graph.capture import capture_placement_graph

BATCH, HEADS, LENGTH, WIDTH, BLOCK = 4, 4, 8, 2, 4
CAUSAL, DOCUMENTS = "causal", "documents"

Score = Callable[[nn.Module], Callable[..., torch.Tensor]]


class Attends(nn.Module):
    """Attention over given queries, keys and values, each scaled by a weight."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.case = case
        self.scales = drawn(3)
        self.of_head = drawn(HEADS)
        self.of_distance = drawn(HEADS, 2 * LENGTH)
        self.sink = drawn(HEADS)
        self.slope = drawn(1)
        self.register_buffer("temperatures", torch.arange(1, BATCH + 1, dtype=torch.float64))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
    ) -> torch.Tensor:
        q, k, v = (each * self.scales[number] for number, each in enumerate((q, k, v)))
        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod=None if self.case.score is None else self.case.score(self),
            block_mask=mask,
            enable_gqa=self.case.num_keys != HEADS,
            return_aux=AuxRequest(lse=True),
        )
        if not self.case.has_sink:
            return out
        shown = torch.sigmoid(aux.lse - self.sink[:, None])
        return out * shown[..., None].to(out.dtype)


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One way to attend."""

    mask: Callable[[], BlockMask]
    score: Score | None = None
    num_keys: int = HEADS
    """Key-value heads."""

    keys_of_all: bool = False
    """Whether all samples share the keys and values of one."""

    has_sink: bool = False


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def causal_mask() -> BlockMask:
    """One row for all samples and heads."""
    return _mask(causal, None, None)


def document_mask() -> BlockMask:
    """A row for each sample, whose documents are looked up."""
    documents = torch.arange(LENGTH) // torch.tensor([[3], [5], [8], [2]])

    def of_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return _mask(of_documents, BATCH, None)


def window_mask() -> BlockMask:
    """A row for each head, whose window is looked up, as many as samples have."""
    windows = torch.tensor([1, 2, 4, 8])

    def of_windows(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < windows[h])

    return _mask(of_windows, None, HEADS)


def dense_mask() -> BlockMask:
    """A row for each sample and head."""
    allowed = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
    allowed = (allowed < 0.6) | torch.eye(LENGTH, dtype=torch.bool)

    def given(b: Any, h: Any, q: Any, k: Any) -> Any:
        return allowed[b, h, q, k]

    return _mask(given, BATCH, HEADS)


def numbered_mask() -> BlockMask:
    """Computed from the number of the sample."""

    def of_number(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= b)

    return _mask(of_number, BATCH, None)


def _mask(function: Any, batch: int | None, heads: int | None) -> BlockMask:
    return create_block_mask(function, batch, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)


def learned_bias(model: Any) -> Any:
    """A number for each head, and a table of distances for each head."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = model.of_distance[h, q - k + LENGTH]
        return s * model.temperatures[b] + 2 * model.of_head[h] + distance

    return score


def learned_slope(model: Any) -> Any:
    """One number for all, times a slope that is computed from the head's number."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + model.slope[0] * (h + 1) * (k - q)

    return score


CASES = {
    "documents": AttentionCase(mask=document_mask, num_keys=2),
    "learned bias": AttentionCase(mask=causal_mask, score=learned_bias, num_keys=2),
    "windows of heads": AttentionCase(mask=window_mask, has_sink=True),
    "samples and heads": AttentionCase(mask=dense_mask, score=learned_bias),
    "one key-value head": AttentionCase(mask=document_mask, score=learned_bias, num_keys=1),
    "keys of one sample": AttentionCase(mask=document_mask, num_keys=2, keys_of_all=True),
    "number of the sample": AttentionCase(mask=numbered_mask),
    "number of the head": AttentionCase(mask=document_mask, score=learned_slope),
}


def inputs_of(case: AttentionCase) -> tuple[Any, ...]:
    """Queries, keys, values and mask; queries lie in memory as after a projection."""
    generator = torch.Generator().manual_seed(3)

    def drawn(batch: int, heads: int) -> torch.Tensor:
        shape = (batch, LENGTH, heads, WIDTH)
        return torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2)

    batch = 1 if case.keys_of_all else BATCH
    queries = drawn(BATCH, HEADS)
    return queries, drawn(batch, case.num_keys), drawn(batch, case.num_keys), case.mask()


@cache
def samples_of(name: str) -> tuple[Sample, ...]:
    """The calls of FlexAttention in one case: forward and backward."""
    case = CASES[name]
    model, inputs = Attends(case), inputs_of(case)
    calls = calls_of_graph(capture_placement_graph(model, inputs), model, inputs)
    found = [call for call in calls if call.operator.startswith("higher_order.")]
    forward, backward = found
    # What nobody reads of the forward is not the same: of rows that see nothing it is undefined.
    return replace(forward, compared=(0, 1)), backward


def flex_attention_samples() -> tuple[Sample, ...]:
    return tuple(sample for name in CASES for sample in samples_of(name))
