"""Experts that run again in their backward have the gradients of those that keep what they made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.apply.placed_experts import PlacedExperts
from gt_config.node_keys import EpRegionAnnotation, PhaseAnnotation
from gt_trace import annotate, read_annotation, trace_step

TOKENS, WIDTH, HIDDEN, NUM_EXPERTS, TOP_K = 6, 4, 8, 3, 2


@dataclass
class Block:
    module: nn.Module = field(default_factory=nn.Identity)
    weight_names: tuple[str, ...] = ("up", "down")
    hidden_dims: tuple[int, ...] = ()
    calls: list[tuple[bool, bool]] = field(default_factory=list)
    """Of each whether it is a second one, and whether it is recorded."""

    def run(
        self,
        tokens: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        token_counts: Tensor,
        weights: Sequence[Tensor],
        *,
        expert_mesh: DeviceMesh | None,
        again: bool,
    ) -> Tensor:
        self.calls.append((again, torch.is_grad_enabled()))
        up, down = (weight[expert_ids] for weight in weights)
        products = torch.einsum("td,tkdh->tkh", tokens, up)
        with annotate(EpRegionAnnotation(kind="compute")):
            hidden = products.tanh()
        return torch.einsum("tkh,tkhd,tk->td", hidden, down, scores)


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    expert_ids = torch.randint(0, NUM_EXPERTS, (TOKENS, TOP_K))
    return [
        torch.randn(TOKENS, WIDTH),
        torch.rand(TOKENS, TOP_K),
        expert_ids,
        expert_ids.flatten().bincount(minlength=NUM_EXPERTS),
        torch.randn(NUM_EXPERTS, WIDTH, HIDDEN),
        torch.randn(NUM_EXPERTS, HIDDEN, WIDTH),
    ]


def placed(block: Block, *, runs_again: bool, keeps_products: bool = False) -> PlacedExperts:
    return PlacedExperts(
        name="experts",
        block=block,
        expert_mesh=None,
        runs_again=runs_again,
        keeps_products=keeps_products,
    )


@pytest.mark.parametrize("runs_again", [False, True])
def test_a_forward_is_recorded_once_where_it_does_not_run_again(
    runs_again: bool,
) -> None:
    block, state = Block(), {}
    node = placed(block, runs_again=runs_again)
    (result,) = node.forward(operands(), state)
    assert not result.requires_grad
    node.backward([torch.ones_like(result), *operands()], state)
    assert block.calls == ([(False, False), (True, True)] if runs_again else [(False, True)])


def test_gradients_are_those_of_what_is_kept_bit_for_bit() -> None:
    gradient = torch.randn(TOKENS, WIDTH)
    found = []
    for runs_again, keeps_products in ((False, False), (True, False), (True, True)):
        state: dict[str, Any] = {}
        node = placed(Block(), runs_again=runs_again, keeps_products=keeps_products)
        (result,) = node.forward(operands(), state)
        found.append((result, *node.backward([gradient, *operands()], state)))
    assert len(found[0]) == 5
    for kept, again, thinned in zip(*found, strict=True):
        assert torch.equal(kept, again)
        assert torch.equal(kept, thinned)


def test_products_that_are_kept_are_computed_once() -> None:
    def step(keeps_products: bool, *given: Tensor) -> Sequence[Tensor]:
        state: dict[str, Any] = {}
        node = placed(Block(), runs_again=True, keeps_products=keeps_products)
        (result,) = node.forward(list(given), state)
        return node.backward([torch.ones_like(result), *given], state)

    def count(keeps_products: bool) -> tuple[int, int]:
        graph = trace_step(partial(step, keeps_products))(*operands()).graph_module.graph
        graph.eliminate_dead_code()
        targets = [str(node.target) for node in graph.nodes]
        return targets.count("aten.bmm.default"), targets.count("aten.tanh.default")

    (products, activations), (fewer, as_many) = count(False), count(True)
    assert fewer == products - 2
    assert as_many == activations == 2


class Loss(torch.autograd.Function):
    """As a placed model: one function, whose backward runs the backward of the experts."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.kept = {}
        (result,) = placed(Block(), runs_again=True).forward(given, ctx.kept)
        return result.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gradient = upstream.expand(TOKENS, WIDTH)
        node = placed(Block(), runs_again=True)
        of_tokens, of_scores, *of_weights = node.backward([gradient, *ctx.saved_tensors], ctx.kept)
        return (of_tokens, of_scores, None, None, *of_weights)


def test_what_runs_again_belongs_to_the_backward_and_hands_its_annotations_on() -> None:
    def step(*given: Tensor) -> Sequence[Tensor]:
        leaves = [each for each in given if each.is_floating_point()]
        return torch.autograd.grad(Loss.apply(*given), leaves)

    given = [each.requires_grad_(each.is_floating_point()) for each in operands()]
    graph = trace_step(step)(*given).graph_module.graph
    marked = {
        node.name: read_annotation(node, PhaseAnnotation)
        for node in graph.nodes
        if read_annotation(node, EpRegionAnnotation) is not None
    }
    first, again, derivative = (
        next(name for name in marked if name.startswith(each))
        for each in ("tanh", "tanh_1", "tanh_backward")
    )
    assert marked[first] == PhaseAnnotation(phase="forward")
    assert marked[again] == marked[derivative] == PhaseAnnotation(phase="backward")
