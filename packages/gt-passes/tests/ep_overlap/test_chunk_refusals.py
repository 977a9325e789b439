"""What cannot be run in chunks is refused by name, and never guessed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from gt_config.node_keys import EpRegionAnnotation
from gt_passes import ChunkModules, PassContext
from gt_passes.ep_overlap import chunk_graph, rule
from gt_passes.ep_overlap.graph_chunks import GraphChunks
from gt_passes.errors import GraphChunkingError
from gt_trace import TracedStep, annotate, trace_step
from gt_trace.testing import fake_world

BATCH, LENGTH, WIDTH = 4, 6, 8


class Layer(nn.Module):
    """Holds one function of its input and weight."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.function = function

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return self.function(x_BLD, self.weight)


class Model(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(function)])

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x_BLD * 2)


class Recurrent(Model):
    """Runs its layer again, on something made of what the layer gave."""

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return self.layers[0](super().forward(x_BLD).exp())


def capture(
    function: Callable[..., torch.Tensor], *, model_class: type[Model] = Model
) -> TracedStep:
    model = model_class(function)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        loss = model(x).sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    return trace_step(step, module=model)(torch.ones(BATCH, LENGTH, WIDTH))


def chunk(
    function: Callable[..., torch.Tensor],
    *,
    modules: str = "layers.*",
    num_chunks: int = 2,
    model_class: type[Model] = Model,
) -> GraphChunks:
    step = capture(function, model_class=model_class)
    return chunk_graph(
        step.graph_module,
        patterns=[modules],
        fake_mode=step.fake_mode,
        num_static_inputs=step.num_static_inputs,
        num_chunks=num_chunks,
    )


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def flipped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.roll(x @ weight, 1, dims=2)


def normalized_over_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ weight, dim=0)


def averaged_over_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight - x.mean(dim=0, keepdim=True)


def balanced(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every token sees how many tokens are positive, squared: not a sum of what chunks see."""
    return x @ weight + (x > 0).sum().pow(2)


def dropped_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(x) @ weight


def sorted_tokens(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sorts tokens in an expert-parallel region, and lets the sorted ones out."""
    y = x @ weight
    with annotate(EpRegionAnnotation(kind="dispatch")):
        order = y.sum(dim=-1).view(-1).argsort()
        dispatched = y.view(-1, WIDTH)[order]
    return dispatched.view(x.shape)


@pytest.mark.parametrize(
    ("function", "operator", "reason"),
    [
        (flipped, "aten.roll.default", "no rule says what this operator does to chunks"),
        (normalized_over_batch, "aten._softmax.default", "it works along dim 0, which is chunked"),
        (averaged_over_batch, "aten.mean.dim", "it works along dim 0, which is chunked"),
        (balanced, "aten.pow.Tensor_Scalar", "it is not linear, and one of its operands is only"),
        (dropped_out, "aten.bernoulli.default", "it draws random numbers"),
        (sorted_tokens, "aten.view.default", "is local to the chunk, and"),
    ],
)
def test_refuses_by_the_name_of_node_and_operator(
    function: Callable[..., torch.Tensor], operator: str, reason: str
):
    pattern = rf"\w+ \({re.escape(operator)}\) in the forward of layers\.0.*{re.escape(reason)}"
    with pytest.raises(GraphChunkingError, match=pattern):
        chunk(function)


def test_refuses_a_region_that_something_outside_takes_apart():
    with pytest.raises(GraphChunkingError) as error:
        chunk(linear, model_class=Recurrent)
    problem = error.value.problems[0]
    assert problem.startswith("no order runs regions in one piece: ")
    assert "the forward of layers.0 before exp before the forward of layers.0" in problem


@torch.library.custom_op("gt_test_chunks::mirrored", mutates_args=())
def mirrored(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


@mirrored.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def with_mirrored(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight + mirrored(x.detach())


def test_an_operator_without_a_rule_is_given_one():
    with pytest.raises(GraphChunkingError, match="no rule says what this operator does"):
        chunk(with_mirrored)
    operator = torch.ops.gt_test_chunks.mirrored.default
    rule(operator)(lambda call: call.state(call.get("x")))
    joins = {join.kind for join in chunk(with_mirrored).joins}
    assert joins == {"cat", "sum"}
    with pytest.raises(ValueError, match="has a chunk rule already"):
        rule(operator)(lambda call: call.state(call.get("x")))


def test_refuses_more_chunks_than_samples():
    with pytest.raises(GraphChunkingError) as error:
        chunk(linear, num_chunks=BATCH + 1)
    assert error.value.problems == ("5 chunks of a batch of 4: allowed are 2 to as many",)


def test_refuses_a_pattern_that_matches_nothing():
    with pytest.raises(GraphChunkingError) as error:
        chunk(linear, modules="blocks.*")
    assert str(error.value) == (
        "the graph cannot be run in chunks:\n  - no node belongs to a module that blocks.* matches"
    )


def test_a_part_of_a_model_may_hold_none_of_the_modules():
    step = capture(linear)
    context = PassContext.from_graph(step.graph_module, static_input_names=("weight",))
    before = str(step.graph_module.graph)
    chunk_modules = ChunkModules(module_patterns=("blocks.*",), may_match_none=True)
    assert not chunk_modules.run(step.graph_module, context).changed
    assert str(step.graph_module.graph) == before


def test_a_graph_with_chunks_is_left_alone():
    step = capture(linear)
    context = PassContext.from_graph(step.graph_module, static_input_names=("weight",))
    chunk_modules = ChunkModules(module_patterns=("layers.*",))
    assert chunk_modules.run(step.graph_module, context).changed
    before = str(step.graph_module.graph)
    again = chunk_modules.run(step.graph_module, context)
    assert not again.changed
    assert "the graph has chunks already" in str(again.refusals[0])
    assert str(step.graph_module.graph) == before


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(rank=0, world_size=2):
        yield
