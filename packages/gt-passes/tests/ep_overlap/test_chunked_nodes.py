"""What enters chunked modules may be of one rank or of several: chunks are of the smallest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gt_config import EpChunkDim
from gt_passes.ep_overlap import chunk_graph
from gt_passes.errors import GraphChunkingError
from gt_trace import TracedStep, trace_step

BATCH, LENGTH, WIDTH = 4, 6, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x_BLD: torch.Tensor, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Adds this rank's part, the second, of what was computed of two."""
        own = (gathered @ self.weight).narrow(dim, x_BLD.shape[dim], x_BLD.shape[dim])
        return (x_BLD @ self.weight).sin() + own


class Model(nn.Module):
    def __init__(self, dim: int, *, excess: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.dim, self.excess = dim, excess

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.cat([x.cos(), x, x.narrow(self.dim, 0, self.excess)], self.dim)
        result: torch.Tensor = self.layers[0](x, gathered, self.dim)
        return result


def traced(model: nn.Module, x: torch.Tensor) -> TracedStep:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        loss = model(x).square().sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    return trace_step(step, module=model)(x)


def chunked(step: TracedStep, chunk_dim: EpChunkDim) -> None:
    chunk_graph(
        step.graph_module,
        patterns=["layers.*"],
        fake_mode=step.fake_mode,
        num_static_inputs=step.num_static_inputs,
        chunk_dim=chunk_dim,
    )
    step.graph_module.recompile()


@pytest.mark.parametrize("dim", [0, 1], ids=["samples gathered", "sequences gathered"])
@pytest.mark.parametrize("chunk_dim", ["batch", "seq"])
def test_of_what_was_gathered_a_chunk_has_each_ranks_part(dim: int, chunk_dim: EpChunkDim) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    model = Model(dim).double()
    step = traced(model, x)
    inputs: list[Any] = [*model.parameters(), x]
    before = step.graph_module(*inputs)
    chunked(step, chunk_dim)
    for one, other in zip(before, step.graph_module(*inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_refuses_inputs_whose_extents_are_no_multiples() -> None:
    step = traced(Model(1, excess=1), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(GraphChunkingError) as error:
        chunked(step, "seq")
    assert str(error.value) == (
        "the graph cannot be run in chunks:\n"
        "  - the modules need inputs (batch, sequence, model) in which each seq is the smallest or "
        "several times that; found cat (4, 13), a_x (4, 6)"
    )


class SummedModel(nn.Module):
    """Its layer also returns a sum over all tokens, whose gradient enters the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SummedLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, total = self.layers[0](x)
        result: torch.Tensor = y.square().sum() + total.sin().sum()
        return result


class SummedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ self.weight).sin()
        return y, y.sum((0, 1), keepdim=True)


@pytest.mark.parametrize("chunk_dim", ["batch", "seq"])
def test_a_gradient_that_is_one_for_all_tokens_says_nothing_of_their_extent(
    chunk_dim: EpChunkDim,
) -> None:
    model = SummedModel().double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    step = traced(model, x)
    before = step.graph_module(*model.parameters(), x)
    chunked(step, chunk_dim)
    for one, other in zip(before, step.graph_module(*model.parameters(), x), strict=True):
        torch.testing.assert_close(one, other)


class FlattenedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, exchanged: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum() + exchanged.sin().sum() + flat.sin().sum()


class FlattenedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FlattenedLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exchanged = x.cos().reshape(4, 2, WIDTH)
        result: torch.Tensor = self.layers[0](x, exchanged, x.tanh().reshape(8, WIDTH))
        return result


def test_refuses_what_begins_with_an_extent_of_two_meanings() -> None:
    """Eight rows are two samples of four tokens, or those of two ranks with two tokens each."""
    step = traced(FlattenedModel(), torch.randn(2, 4, WIDTH))
    with pytest.raises(GraphChunkingError) as error:
        chunked(step, "batch")
    assert str(error.value) == (
        "the graph cannot be run in chunks:\n"
        "  - view_1 of shape (8, 3) enters at sin_1, depends on the step's inputs, and has neither "
        "batch 2 and sequence 4 or batch 4 and sequence 2 in front nor the same value for all "
        "chunks"
    )
