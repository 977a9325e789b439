"""Models that compile their own FlexAttention, captured with a mask that comes with the batch.

FlexAttention refuses CPU tensors that need a gradient, and nothing else keeps it from training on a
CPU: its operator has one dense implementation for all devices, forward and backward. Without that
refusal the captured graph and the eager model run the same kernels, so that they are compared to
the bit. What a GPU runs instead, Inductor's kernels, is not seen here.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.utils import _pytree as pytree
from trace_models import assert_same

from gt_config.node_keys import ModuleAnnotation, PhaseAnnotation
from gt_trace import (
    BoundStep,
    ConstantCapturedError,
    InputMismatchError,
    TracedStep,
    flex_attention_on_cpu,
    module_fqn,
    phase_of,
    read_annotation,
    register_block_masks,
    trace_step,
)

LENGTH, BLOCK = 32, 16

compiled_flex_attention = torch.compile(flex_attention)
"""As models have it: once, for all their layers."""


class Attention(nn.Module):
    """Self-attention of two heads; x is (B, L, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, mask: BlockMask | None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = compiled_flex_attention(q, k, v, block_mask=mask, scale=0.25)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Layers under one mask."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(num_layers)])

    def forward(self, x: torch.Tensor, mask: BlockMask | None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


def within(documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Which pairs of positions are of one document; (B, L) of numbers of documents."""

    def same_document(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return documents[b, q] == documents[b, k]

    return same_document


def mask_for(documents: torch.Tensor, *others: Any, block: int = BLOCK) -> BlockMask:
    batch, length = documents.shape
    mask_mod = and_masks(*(others or (causal,)), within(documents))
    return create_block_mask(mask_mod, batch, None, length, length, device="cpu", BLOCK_SIZE=block)


def batch_of(seed: int, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations, and the number of the document of each position."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, 8, generator=generator)
    return x, (torch.rand(2, length, generator=generator) < 0.2).int().cumsum(1)


def step_of(model: nn.Module) -> Callable[..., Any]:
    def step(x: torch.Tensor, mask: BlockMask | None) -> Any:
        loss = model(x, mask).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


@pytest.fixture(scope="module", autouse=True)
def _cpu_trains() -> Iterator[None]:
    """See the top of this file."""
    with flex_attention_on_cpu():
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(num_layers=2)


@pytest.fixture(scope="module")
def traced(model: Model, _cpu_trains: None) -> TracedStep:
    x, documents = batch_of(0)
    return trace_step(step_of(model), module=model)(x, mask_for(documents))


@pytest.fixture(scope="module")
def bound(traced: TracedStep, model: Model) -> BoundStep:
    return traced.bind(model)


def subgraphs(node: Node) -> list[Node]:
    return [each for each in node.all_input_nodes if each.op == "get_attr"]


def test_batches_of_other_documents_are_bitwise_eager(bound: BoundStep, model: Model) -> None:
    losses = set()
    for seed in range(3):
        x, documents = batch_of(seed)
        with torch.compiler.set_stance("force_eager"):
            expected = step_of(model)(x, mask_for(documents))
        found = bound(x, mask_for(documents))
        assert_same(found, expected)
        # Else the masks would not matter.
        assert not torch.equal(bound(x, mask_for(documents.roll(5, dims=1)))[0], found[0])
        losses.add(found[0].item())
    assert len(losses) == 3


def test_a_mask_s_tensors_are_inputs_those_that_its_function_reads_too(traced: TracedStep) -> None:
    names = [each.name for each in traced.inputs if each.name.startswith("mask")]
    assert names == [
        "mask.kv_num_blocks",
        "mask.kv_indices",
        "mask.full_kv_num_blocks",
        "mask.full_kv_indices",
        "mask.q_num_blocks",
        "mask.q_indices",
        "mask.full_q_num_blocks",
        "mask.full_q_indices",
        "mask._closure_0",
    ]
    graph = traced.graph_module.graph
    *_, documents = [node for node in graph.find_nodes(op="placeholder") if "mask" in node.name]
    readers = [str(user.target) for user in documents.users]
    assert sorted(readers) == ["flex_attention"] * 2 + ["flex_attention_backward"] * 2


def test_operators_and_their_functions_are_of_their_layer_and_phase(traced: TracedStep) -> None:
    graph = traced.graph_module.graph
    attention = [node for node in graph.nodes if str(node.target).startswith("flex_attention")]
    found = [
        (str(node.target), module_fqn(each), phase_of(each))
        for node in attention
        for each in (node, *subgraphs(node))
    ]
    forward, backward = "flex_attention", "flex_attention_backward"
    assert found == [
        *[(forward, "layers.0", "forward")] * 3,
        *[(forward, "layers.1", "forward")] * 3,
        *[(backward, "layers.1", "backward")] * 4,
        *[(backward, "layers.0", "backward")] * 4,
    ]
    for node in attention:
        assert read_annotation(node, ModuleAnnotation) is not None
        assert read_annotation(node, PhaseAnnotation) is not None
    assert all("compiled_flex_attention(" in node.stack_trace for node in attention[:2])


def test_a_copy_of_the_graph_runs_alike(traced: TracedStep, model: Model) -> None:
    x, documents = batch_of(1)
    expected = traced.bind(model)(x, mask_for(documents))
    copied = replace(traced, graph_module=copy.deepcopy(traced.graph_module))
    assert_same(copied.bind(model)(x, mask_for(documents)), expected)


def test_other_lengths_and_blocks_are_told_by_name(bound: BoundStep) -> None:
    x, documents = batch_of(0, length=64)
    with pytest.raises(InputMismatchError) as error:
        bound(x, mask_for(documents, block=32))
    assert str(error.value) == (
        "the arguments have another structure than the captured ones:\n"
        "  mask: BlockMask with seq_lengths (64, 64), captured with (32, 32)\n"
        "  mask: BlockMask with BLOCK_SIZE (32, 32), captured with (16, 16)"
    )


def test_another_mask_function_is_told_by_name(bound: BoundStep) -> None:
    def backwards(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return q <= k

    x, documents = batch_of(0)
    with pytest.raises(InputMismatchError) as error:
        bound(x, mask_for(documents, backwards))
    here = "test_another_mask_function_is_told_by_name.<locals>.backwards"
    assert str(error.value) == (
        "the arguments have another structure than the captured ones:\n"
        f"  mask: BlockMask with mask_mod and_masks.<locals>.and_mask({here}, "
        "within.<locals>.same_document), captured with and_masks.<locals>.and_mask(causal, "
        "within.<locals>.same_document)"
    )


def test_two_mask_functions_of_one_name_are_told_apart_by_their_lines(bound: BoundStep) -> None:
    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q > k

    causal.__qualname__ = "causal"
    x, documents = batch_of(0)
    with pytest.raises(InputMismatchError, match=rf"causal of {__file__}:\d+.*, captured with "):
        bound(x, mask_for(documents, causal))


def test_no_mask_instead_of_one_is_told_by_name(bound: BoundStep) -> None:
    with pytest.raises(InputMismatchError) as error:
        bound(batch_of(0)[0], None)
    assert str(error.value) == (
        "the arguments have another structure than the captured ones:\n"
        "  mask: None, captured as BlockMask"
    )


def test_a_number_that_a_mask_closes_over_must_stay() -> None:
    def window(width: int) -> Callable[..., torch.Tensor]:
        return lambda b, h, q, k: q - k < width

    model = Model(num_layers=1)
    x, documents = batch_of(0)
    bound = trace_step(step_of(model), module=model)(x, mask_for(documents, window(4))).bind(model)
    bound(x, mask_for(documents, window(4)))
    with pytest.raises(InputMismatchError, match=r"_closure_0: 5, captured with the constant 4"):
        bound(x, mask_for(documents, window(5)))


def test_refuses_a_mask_that_is_no_argument() -> None:
    model = Model(num_layers=1)
    x, documents = batch_of(0)

    def step(x: torch.Tensor) -> Any:
        return step_of(model)(x, mask_for(documents))

    with pytest.raises(ConstantCapturedError, match=r"torch.int64 \[2, 32\]"):
        trace_step(step, module=model)(x)


def test_refuses_a_mask_whose_function_hides_its_tensors() -> None:
    class Within:
        """What PyTorch cannot take apart."""

        def __init__(self, documents: torch.Tensor) -> None:
            self.documents = documents

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return self.documents[b, q] == self.documents[b, k]

    model = Model(num_layers=1)
    x, documents = batch_of(0)
    mask = create_block_mask(Within(documents), 2, None, LENGTH, LENGTH, device="cpu")
    with pytest.raises(ConstantCapturedError, match=r"torch.int64 \[2, 32\]"):
        trace_step(step_of(model), module=model)(x, mask)


def test_what_a_mask_is_apart_from_values_can_be_sent_to_another_process() -> None:
    register_block_masks()
    here = mask_for(batch_of(0)[1], partial(in_window, 3))
    values, structure = pytree.tree_flatten(here)
    received = pickle.loads(pickle.dumps(structure))
    assert received == structure
    assert received == pytree.tree_structure(mask_for(batch_of(1)[1], partial(in_window, 5)))
    assert received != pytree.tree_structure(mask_for(batch_of(0)[1]))
    there = pytree.tree_unflatten(values, received)
    numbers = [torch.arange(2)[:, None, None], torch.zeros(()), *positions_of(LENGTH)]
    assert torch.equal(there.mask_mod(*numbers), here.mask_mod(*numbers))


def in_window(width: int, b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q - k).abs() < width


def positions_of(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None, :]
