"""Routed experts of one layer as one opaque operator: what is planned of them, and what may be.

Which token goes to which expert depends on data, and no DTensor placement says so. So the planner
sees the routed experts of a layer as one node forward and one backward, whose ways to run on a mesh
axis are few and known: replicated, on each rank's own tokens (with FSDP of the weights, if the plan
stores them sharded), tensor-parallel, where each rank has a part of every expert's hidden features,
or expert-parallel, where tokens travel to the rank that has their expert.
The placed model runs the model's own dispatcher and experts (``ExpertBlock.run``).

While ``opaque_experts`` lasts, the blocks of a model call ``gt_autoparallel::experts``; captured in
it, each call becomes a node of kind ``experts`` with the arguments of the operator. The operators
are planned, and run only when placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from gt_autoparallel.argument_checks import kind_problem
from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.graph.layouts import Layout
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode

FIRST_WEIGHT_OPERAND = 4
"""Position of the first weight among the operands of a forward node: tokens, scores, expert ids and
token counts come before it, and in a backward node the gradient of the result before those."""


class ExpertBlock(Protocol):
    """The routed experts of one layer, as their model has them."""

    @property
    def module(self) -> nn.Module:
        """Called by the model with (tokens, scores, expert ids, token counts)."""
        ...

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of its parameters below ``module``; dim 0 of each counts the experts."""
        ...

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """Of each weight the dim of hidden features; empty if ``run`` takes no parts of them.

        Tensor parallelism cuts weights along these, and results are terms of a sum then.
        """
        ...

    def run(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        token_counts: torch.Tensor,
        weights: Sequence[torch.Tensor],
        *,
        expert_mesh: DeviceMesh | None,
        again: bool,
    ) -> torch.Tensor:
        """Send this rank's tokens through their experts; differentiable.

        Args:
            tokens: (..., D) this rank's.
            scores: (..., K) weight of each token's experts in the result.
            expert_ids: (..., K) integers.
            token_counts: (E,) how many of this rank's tokens go to each expert.
            weights: in the order of ``weight_names``, all experts, or this rank's share of them;
                of each all hidden features, or this rank's part.
            expert_mesh: one-dimensional, the ranks over which experts are distributed, whose shares
                are in their order; None if this rank has all of them.
            again: whether it has run on these tokens before, for their backward now: what is
                counted of tokens, say, is counted then.

        Returns:
            (..., D) the result for each of this rank's tokens, or this rank's term of it.
        """
        ...


def expert_problems(experts: object) -> Iterator[str]:
    """A line for each thing that is wrong with expert blocks that a caller gives."""
    allowed = "a mapping from names of modules to expert blocks, or None"
    problem = kind_problem(experts, "experts", (Mapping, NoneType), allowed)
    if problem is not None:
        yield problem
    if not isinstance(experts, Mapping):
        return
    for name, block in experts.items():
        parts = ("module", "weight_names", "hidden_dims", "run")
        missing = [part for part in parts if not hasattr(block, part)]
        if missing:
            yield (
                f"experts[{name!r}], of type {type(block).__name__}, lacks {', '.join(missing)}; "
                "allowed: an ExpertBlock"
            )


_ARGUMENTS = (
    "Tensor tokens, Tensor scores, Tensor expert_ids, Tensor token_counts, Tensor[] weights, "
    "int[] hidden_dims, str module"
)
torch.library.define("gt_autoparallel::experts", f"({_ARGUMENTS}) -> Tensor")
torch.library.define(
    "gt_autoparallel::experts_backward", f"(Tensor gradient, {_ARGUMENTS}) -> Tensor[]"
)


def _refuse(*arguments: object) -> NoReturn:
    raise NotImplementedError(
        f"the experts of {arguments[-1]} are planned, and run only when placed"
    )


for _name in ("experts", "experts_backward"):
    torch.library.impl(f"gt_autoparallel::{_name}", "default", _refuse)


@torch.library.register_fake("gt_autoparallel::experts")  # type: ignore[untyped-decorator]  # torch leaves it so
def _(tokens: torch.Tensor, *others: object) -> torch.Tensor:
    return tokens.new_empty(tokens.shape)


@torch.library.register_fake("gt_autoparallel::experts_backward")  # type: ignore[untyped-decorator]  # torch leaves it so
def _(
    gradient: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    token_counts: torch.Tensor,
    weights: list[torch.Tensor],
    *others: object,
) -> list[torch.Tensor]:
    return [value.new_empty(value.shape) for value in (tokens, scores, *weights)]


EXPERTS = torch.ops.gt_autoparallel.experts.default
"""(tokens, scores, expert_ids, token_counts, weights, hidden dims, module name) -> result for each
token."""

EXPERTS_BACKWARD = torch.ops.gt_autoparallel.experts_backward.default
"""(gradient, and the arguments of ``EXPERTS``) -> gradients of tokens, scores and each weight."""


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: object, output: object
) -> None:
    assert isinstance(inputs, tuple)
    *routed, weights, hidden_dims, module = inputs
    ctx.save_for_backward(*routed, *weights)
    ctx.block = (hidden_dims, module)  # type: ignore[attr-defined]  # a context takes any attribute


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
) -> tuple[torch.Tensor | list[torch.Tensor] | None, ...]:
    saved: tuple[torch.Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]  # set by save_for_backward
    routed, weights = saved[:FIRST_WEIGHT_OPERAND], list(saved[FIRST_WEIGHT_OPERAND:])
    block: tuple[list[int], str] = ctx.block  # type: ignore[attr-defined]  # set above
    of_tokens, of_scores, *of_weights = EXPERTS_BACKWARD(gradient, *routed, weights, *block)
    # Of numbers there is none, but torch takes an empty list for one of tensors.
    of_dims: list[torch.Tensor] | None = None if block[0] else []
    return of_tokens, of_scores, None, None, of_weights, of_dims, None


torch.library.register_autograd(
    "gt_autoparallel::experts", _differentiate, setup_context=_setup_context
)


@contextmanager
def opaque_experts(model: nn.Module, blocks: Mapping[str, ExpertBlock]) -> Iterator[None]:
    """Inside, the expert blocks of ``model`` are one operator each, for a capture to plan.

    Raises:
        PlacementInputError: a name is not that of its block's module.
    """
    modules = dict(model.named_modules())
    wrong = [name for name, block in blocks.items() if modules.get(name) is not block.module]
    if wrong:
        raise PlacementInputError(
            f"expert blocks {wrong!r} are not modules of the model under these names"
        )
    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.enter_context(_opaque_forward(name, block))
        yield


@contextmanager
def _opaque_forward(name: str, block: ExpertBlock) -> Iterator[None]:
    module = block.module

    def forward(
        tokens: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        token_counts: torch.Tensor,
    ) -> torch.Tensor:
        weights = [_attribute(module, weight) for weight in block.weight_names]
        result: torch.Tensor = EXPERTS(
            tokens, scores, expert_ids, token_counts, weights, list(block.hidden_dims), name
        )
        return result

    had_own = vars(module).get("forward")
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if had_own is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", had_own)


def _attribute(module: nn.Module, name: str) -> torch.Tensor:
    """As the module reads it: a capture puts tensors that are no parameters in their places."""
    parent, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(parent), last)
    assert isinstance(value, torch.Tensor)
    return value


def expert_weight_layout(node: PlacementNode, option: NodeOption) -> Layout:
    """The layout in which a block computes with its weights, which says where the experts are."""
    return option.operands[FIRST_WEIGHT_OPERAND + (node.phase == "backward")]


def hidden_dims_of(node: PlacementNode) -> tuple[int, ...]:
    """``ExpertBlock.hidden_dims`` of the block that a node stands for."""
    return tuple(node.args[-2])


def expert_parallel_axes(node: PlacementNode, option: NodeOption) -> tuple[int, ...]:
    """The mesh axes over which experts are distributed; none if each rank has all it is given."""
    layout = expert_weight_layout(node, option)
    return tuple(axis for axis, placement in enumerate(layout) if placement == Shard(0))
