"""Layers with FlexAttention, which takes functions, are stamped with copies of their graphs.

FlexAttention refuses CPU tensors that need a gradient, and nothing else keeps it from a backward
there; without that refusal captured graphs run too, by its dense implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stamp_models import Toy, stamp
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

from gt_trace import flex_attention_on_cpu, trace_step
from gt_trace.stamping import step_differences, trace_step_by_stamping
from gt_trace.stamping.report import StampedCapture

LENGTH, BLOCK, WIDTH = 32, 16, 8
ODD = 3
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
compiled_flex_attention = torch.compile(flex_attention)


@pytest.fixture(autouse=True)
def attention_trains_on_cpu() -> Iterator[None]:
    with flex_attention_on_cpu(), torch.compiler.set_stance("force_eager"):
        yield


def plus(amount: float) -> Score:
    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + amount * (query - key)

    return score


class Attention(nn.Module):
    """Self-attention of two heads; x is (B, L, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = 0.25
        self.score: Score | None = None

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = compiled_flex_attention(
            q, k, v, score_mod=self.score_function(), block_mask=mask, scale=self.scale
        )
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def score_function(self) -> Score | None:
        return self.score


class Sloped(Attention):
    """Each layer reads a table of its own, by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(2))

    def score_function(self) -> Score:
        return self.sloped

    def sloped(
        self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        return score + self.slopes[head] * (query - key)


class Learning(Sloped):
    """Each layer learns what its function adds; uncompiled FlexAttention has no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.rand(2))

    def score_function(self) -> Score:
        learned = self.learned

        def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            score = torch.where(query >= key, score + learned[head], -float("inf"))
            return self.sloped(score, batch, head, query, key)

        return score


class Attending(nn.Module):
    """Input projection and layers."""

    def __init__(self, layer: Callable[[], nn.Module] = Attention, num_layers: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers: Any = nn.ModuleList(layer() for _ in range(num_layers))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def step_of(model: nn.Module) -> Callable[..., Any]:
    def step(x: Tensor, mask: BlockMask) -> Any:
        loss = model(x, mask).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


def batch_of(first_document: int) -> tuple[Tensor, BlockMask]:
    """Two samples of two documents, of which the first has as many tokens."""
    documents = (torch.arange(LENGTH) >= first_document).long().repeat(2, 1)

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def in_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[batch, query] == documents[batch, key]

    mask = create_block_mask(
        and_masks(causal, in_document), 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
    )
    return torch.rand(2, LENGTH, WIDTH), mask


def stamped(model: nn.Module) -> StampedCapture:
    return trace_step_by_stamping(step_of(model), module=model)(*batch_of(10))


@pytest.mark.parametrize("layer", [Attention, Learning])
def test_stamped_capture_is_the_full_one(layer: Callable[[], nn.Module]) -> None:
    model = Attending(layer, num_layers=7)
    captured = stamped(model)
    assert captured.report.refusal is None
    full = trace_step(step_of(model), module=model)(*batch_of(10))
    assert step_differences(captured.step, full) == []
    names = [node.target for node in captured.step.graph_module.graph.find_nodes(op="get_attr")]
    held = [captured.step.graph_module.get_submodule(str(name)) for name in names]
    # Scores and masks of the forward; of the backward, the derivatives too.
    assert len(names) == 5 * 7
    assert len({id(each) for each in held}) == len(held)
    assert all(isinstance(each, GraphModule) for each in held)
    # Also the derivative of a score belongs to the layer that uses it.
    for reader in captured.step.graph_module.graph.find_nodes(op="get_attr"):
        nodes: Any = captured.step.graph_module.get_submodule(str(reader.target))
        inside = {
            str(node.meta["custom"]["gt.module"])
            for node in nodes.graph.nodes
            if node.op == "call_function"
        }
        assert inside <= {str(reader.meta["custom"]["gt.module"])}


def test_stamped_step_computes_what_eager_does_for_other_documents() -> None:
    torch.manual_seed(0)
    model = Attending(Sloped, num_layers=6)
    captured = stamped(model)
    assert captured.report.stamped
    for first_document in (10, 21):
        batch = batch_of(first_document)
        loss, gradients = captured.step.bind(model)(*batch)
        expected_loss, expected = step_of(model)(*batch)
        assert torch.equal(loss, expected_loss)
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert torch.equal(gradient, wanted)


def test_checkpointed_layer_whose_scores_save_tensors_computes_what_others_do() -> None:
    """Eager PyTorch would run the layer again inside of the score's derivative, and gives NaN."""

    class Capped(Attending):
        is_checkpointed = True

        def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
            (layer,) = self.layers
            if self.is_checkpointed:
                return checkpoint(layer, self.enter(x), mask, use_reentrant=False)
            return layer(self.enter(x), mask)

    torch.manual_seed(0)
    model = Capped(num_layers=1)
    model.layers[0].score = lambda score, *_: 20 * torch.tanh(score / 20)
    batch = batch_of(10)
    loss, gradients = trace_step(step_of(model), module=model)(*batch).bind(model)(*batch)
    model.is_checkpointed = False
    expected_loss, expected = step_of(model)(*batch)
    assert torch.equal(loss, expected_loss)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_difference_inside_of_a_subgraph_is_seen() -> None:
    model = Attending(num_layers=6)
    captured = stamped(model)
    full = trace_step(step_of(model), module=model)(*batch_of(10))
    other: Any = full.graph_module.sdpa_mask3
    node = next(node for node in other.graph.nodes if node.op == "call_function")
    node.meta["custom"] = {}
    assert [line.partition(":")[0] for line in step_differences(captured.step, full)] == [
        "annotations in subgraphs"
    ]
    full.graph_module.sdpa_mask2 = full.graph_module.sdpa_score2
    (first, second) = sorted(step_differences(captured.step, full))
    assert first.startswith("annotations in subgraphs")
    assert second.startswith("subgraphs: sdpa_mask2: their code differs")


def other_constant(model: Any) -> None:
    for index, layer in enumerate(model.layers):
        layer.score = plus(0.5 if index == ODD else 0.25)


def other_function(model: Any) -> None:
    model.layers[ODD].score = plus(0.0)


def other_scale(model: Any) -> None:
    model.layers[ODD].scale = 0.5


class OtherMask(Attending):
    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = self.enter(x)
        everything = create_block_mask(
            lambda batch, head, query, key: query == query,
            *(2, None, LENGTH, LENGTH),
            device="cpu",
            BLOCK_SIZE=BLOCK,
        )
        for index, layer in enumerate(self.layers):
            x = layer(x, everything if index == ODD else mask)
        return x


class ScoreByIndex(Attending):
    """What a function closes over counts, not which function it is."""

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = self.enter(x)
        for index, layer in enumerate(self.layers):
            layer.score_function = lambda amount=float(index == ODD): plus(amount)
            x = layer(x, mask)
            del layer.score_function
        return x


class Window:
    """An object that the functions of all layers read, and that holds something else by turns.

    A forward leaves it as it was.
    """

    def __init__(self) -> None:
        self.size = LENGTH
        self.head = 0
        self.slopes: Any = None


class OtherWindow(Attending):
    """One mask function of all layers, and one object that it closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window()

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = self.enter(x)
        mask.mask_mod = lambda batch, head, query, key: query - key < self.window.size
        for index, layer in enumerate(self.layers):
            self.window.size = LENGTH // (2 if index == ODD else 1)
            x = layer(x, mask)
        self.window.size = LENGTH
        return x


class OtherSlope(Attending):
    """One score function of all layers, which reads another place of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window()
        self.register_buffer("slopes", torch.rand(2))
        for layer in self.layers:
            layer.score = self.score

    def score(
        self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        return score + self.window.slopes[self.window.head]

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = self.enter(x)
        self.window.slopes = self.slopes
        for index, layer in enumerate(self.layers):
            self.window.head = int(index == ODD)
            x = layer(x, mask)
        self.window.head, self.window.slopes = 0, None
        return x


class OtherTable(OtherSlope):
    """One score function of all layers, which reads another table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("others", torch.rand(2))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = self.enter(x)
        for index, layer in enumerate(self.layers):
            self.window.slopes = self.others if index == ODD else self.slopes
            x = layer(x, mask)
        self.window.slopes = None
        return x


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (Attending, other_constant, r"layers\.3\.score\.__closure__\[0\] is 0\.5, and 0\.25 in"),
        (Attending, other_function, r"layers\.3\.score is function, and NoneType in"),
        (Attending, other_scale, r"layers\.3\.scale is 0\.5, and 0\.25 in"),
        (OtherMask, None, r"layers\.3 computes otherwise than layers\.1"),
        (ScoreByIndex, None, r"layers\.3 computes otherwise than layers\.1"),
        (OtherWindow, None, r"layers\.3 computes otherwise than layers\.1: aten\.lt\.Scalar"),
        (OtherSlope, None, r"layers\.3 computes otherwise than layers\.1: aten\.index\.Tensor"),
        (OtherTable, None, r"layers\.3 computes otherwise.*: an operand comes from elsewhere"),
    ],
)
def test_other_functions_of_one_layer_are_a_reason_to_trace_all(
    kind: type[Attending],
    change: Callable[[Any], None] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a full trace gives is tested elsewhere, and takes most of the time here.
    monkeypatch.setattr(
        "gt_trace.stamping.trace_by_stamping.trace_step", lambda *_, **__: lambda *_: None
    )
    model = kind()
    if change is not None:
        change(model)
    refusal = stamped(model).report.refusal
    assert refusal is not None
    assert re.search(reason, refusal), refusal


def test_equal_functions_made_anew_for_each_layer_are_stamped() -> None:
    model = Attending()
    for layer in model.layers:
        layer.score = plus(0.25)
    assert stamped(model).report.refusal is None


def test_other_operators_with_graphs_of_their_own_are_refused() -> None:
    class Branching(Toy):
        def run_layers(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x)
                x = torch.cond(y.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))
            return x

    model = Branching().requires_grad_(requires_grad=False)
    captured = stamp(model, lambda batch: model(batch).sum())
    assert captured.report.refusal is not None
    assert "cond has a graph of its own, which is not stamped" in captured.report.refusal
