"""Routed experts of one layer as one opaque operator: what is planned of them, and what may be.

Which token goes to which expert depends on data, and no DTensor placement says so. So the planner
sees the routed experts of a layer as one node forward and one backward, whose ways to run on a mesh
axis are few and known: replicated, on each rank's own tokens (with FSDP of the weights, if the plan
stores them sharded), or expert-parallel, where tokens travel to the rank that has their expert.
The placed model runs the model's own dispatcher and experts (``ExpertBlock.run``).

While ``opaque_experts`` lasts, the blocks of a model call ``gt_autoparallel::experts``; captured in
it, each call becomes a node of kind ``experts`` with the arguments of the operator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.layouts import Layout, MeshShape, fits, local_shape
from gt_autoparallel.options import AxisOption, NodeOption
from gt_autoparallel.placement_graph import PlacementNode, TensorSpec

FIRST_WEIGHT_OPERAND = 4
"""Of a forward node: tokens, scores, expert ids and token counts come before the weights, and the
gradient of the result before all of them in a backward node."""


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

    def run(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        token_counts: torch.Tensor,
        weights: Sequence[torch.Tensor],
        *,
        expert_mesh: DeviceMesh | None,
    ) -> torch.Tensor:
        """Send this rank's tokens through their experts; differentiable.

        Args:
            tokens: (..., D) this rank's.
            scores: (..., K) weight of each token's experts in the result.
            expert_ids: (..., K) integers.
            token_counts: (E,) how many of this rank's tokens go to each expert.
            weights: in the order of ``weight_names``, all experts, or this rank's share of them.
            expert_mesh: the one mesh axis over which experts are distributed; None if this rank
                has all of them.

        Returns:
            (..., D) the result for each of this rank's tokens.
        """
        ...


@torch.library.custom_op("gt_autoparallel::experts", mutates_args=())
def _experts(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    token_counts: torch.Tensor,
    weights: list[torch.Tensor],
    module: str,
) -> torch.Tensor:
    raise NotImplementedError(f"the experts of {module} are planned, and run only when placed")


@_experts.register_fake
def _(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    token_counts: torch.Tensor,
    weights: list[torch.Tensor],
    module: str,
) -> torch.Tensor:
    return tokens.new_empty(tokens.shape)


@torch.library.custom_op("gt_autoparallel::experts_backward", mutates_args=())
def _experts_backward(
    gradient: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    token_counts: torch.Tensor,
    weights: list[torch.Tensor],
    module: str,
) -> list[torch.Tensor]:
    raise NotImplementedError(f"the experts of {module} are planned, and run only when placed")


@_experts_backward.register_fake
def _(
    gradient: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    token_counts: torch.Tensor,
    weights: list[torch.Tensor],
    module: str,
) -> list[torch.Tensor]:
    return [value.new_empty(value.shape) for value in (tokens, scores, *weights)]


EXPERTS = torch.ops.gt_autoparallel.experts.default
"""(tokens, scores, expert_ids, token_counts, weights, module name) -> result for each token."""

EXPERTS_BACKWARD = torch.ops.gt_autoparallel.experts_backward.default
"""(gradient, and the arguments of ``EXPERTS``) -> gradients of tokens, scores and each weight."""


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: object, output: object
) -> None:
    assert isinstance(inputs, tuple)
    *routed, weights, module = inputs
    ctx.save_for_backward(*routed, *weights)
    ctx.module = module  # type: ignore[attr-defined]  # a context takes any attribute


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
) -> tuple[torch.Tensor | list[torch.Tensor] | None, ...]:
    saved: tuple[torch.Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]  # set by save_for_backward
    routed, weights = saved[:FIRST_WEIGHT_OPERAND], list(saved[FIRST_WEIGHT_OPERAND:])
    module: str = ctx.module  # type: ignore[attr-defined]  # set above
    of_tokens, of_scores, *of_weights = EXPERTS_BACKWARD(gradient, *routed, weights, module)
    return of_tokens, of_scores, None, None, of_weights, None


_experts.register_autograd(_differentiate, setup_context=_setup_context)


@contextmanager
def opaque_experts(model: nn.Module, blocks: Mapping[str, ExpertBlock]) -> Iterator[None]:
    """Inside, the expert blocks of ``model`` are one operator each, for a capture to plan.

    Args:
        model: what is going to be captured.
        blocks: by the fully qualified name of their modules.

    Raises:
        PlacementInputError: a name is not that of its block's module.
    """
    wrong = [name for name, block in blocks.items() if _find(model, name) is not block.module]
    if wrong:
        raise PlacementInputError(
            f"expert blocks {wrong!r} are not modules of the model under these names"
        )
    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.enter_context(_opaque_forward(name, block))
        yield


def _find(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


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
        result: torch.Tensor = EXPERTS(tokens, scores, expert_ids, token_counts, weights, name)
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


# ---- how a block may run -----------------------------------------------------------------------


def expert_options(
    node: PlacementNode, operands: tuple[TensorSpec, ...], mesh: MeshShape
) -> tuple[NodeOption, ...]:
    """Every way to run a node of kind ``experts`` on a mesh.

    Along one axis: replicated; each rank's own tokens (of the first or the second token dim) with
    all the weights it is given; or expert-parallel, each rank having its own tokens and its own
    experts. At most one axis is expert-parallel: token dispatchers know one process group.

    The backward node of a block must run with the option of its forward node; the planner links
    them, since what the forward keeps only its own backward can use.

    Args:
        node: forward (operands: tokens, scores, expert ids, token counts, weights), or backward
            (the gradient of the result comes first).
        operands: its global tensors.
        mesh: sizes of the axes.
    """
    is_backward = node.phase == "backward"
    routed = operands[1:] if is_backward else operands
    num_weights = len(routed) - FIRST_WEIGHT_OPERAND
    token_dims = len(routed[0].shape) - 1
    choices: list[AxisOption] = [_axis_option(None, False, num_weights, is_backward)]
    for dim in range(token_dims):
        choices.append(_axis_option(dim, False, num_weights, is_backward))
        choices.append(_axis_option(dim, True, num_weights, is_backward))
    weights_at = FIRST_WEIGHT_OPERAND + is_backward
    options: list[NodeOption] = []
    for combination in itertools.product(choices, repeat=mesh.num_axes):
        if sum(choice.operands[weights_at] == Shard(0) for choice in combination) > 1:
            continue
        option = _on_mesh(combination)
        specs = zip((*operands, *node.outputs), (*option.operands, *option.outputs), strict=True)
        if all(
            spec is None or layout is None or fits(spec.shape, layout, mesh)
            for spec, layout in specs
        ):
            options.append(option)
    return tuple(options)


def _axis_option(
    token_dim: int | None, expert_parallel: bool, num_weights: int, is_backward: bool
) -> AxisOption:
    tokens: Placement = Replicate() if token_dim is None else Shard(token_dim)
    counts: Placement = Replicate() if token_dim is None else Partial("sum")
    weights: Placement = Shard(0) if expert_parallel else Replicate()
    # Each rank has seen its own tokens only, unless the others sent theirs.
    of_weights: Placement = Shard(0) if expert_parallel else counts
    operands = (tokens, tokens, tokens, counts, *[weights] * num_weights)
    if not is_backward:
        return AxisOption(operands=operands, outputs=(tokens,))
    return AxisOption(
        operands=(tokens, *operands), outputs=(tokens, tokens, *[of_weights] * num_weights)
    )


def _on_mesh(choices: Sequence[AxisOption]) -> NodeOption:
    def layouts(side: Literal["operands", "outputs"]) -> tuple[Layout, ...]:
        return tuple(zip(*(getattr(choice, side) for choice in choices), strict=True))

    return NodeOption(
        operands=layouts("operands"), outputs=layouts("outputs"), axis_options=tuple(choices)
    )


def expert_weight_layout(node: PlacementNode, option: NodeOption) -> Layout:
    """The layout in which a block computes with its weights, which says where the experts are."""
    return option.operands[FIRST_WEIGHT_OPERAND + (node.phase == "backward")]


def expert_parallel_axis(node: PlacementNode, option: NodeOption) -> int | None:
    """The mesh axis over which experts are distributed; None if each rank has all it is given."""
    for axis, placement in enumerate(expert_weight_layout(node, option)):
        if placement == Shard(0):
            return axis
    return None


# ---- what a block costs at balanced routing ----------------------------------------------------


def _routed(node: PlacementNode, operands: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return operands[1:] if node.phase == "backward" else operands


def _local_rows(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> int:
    """Rows that a rank sends to experts: its tokens, once for each of their experts.

    At balanced routing an expert-parallel rank receives as many as it sends.
    """
    at = 2 if node.phase == "backward" else 1
    return math.prod(local_shape(operands[at].shape, option.operands[at], mesh))


def experts_flops(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> float:
    """Floating-point operations of one rank: each row through one expert's matrices.

    forward   2 * rows * sum_w numel(w) / E
    backward  twice that
    """
    weights = _routed(node, operands)[FIRST_WEIGHT_OPERAND:]
    per_row = sum(math.prod(weight.shape[1:]) for weight in weights)
    factor = 4.0 if node.phase == "backward" else 2.0
    return factor * _local_rows(node, operands, option, mesh) * per_row


def experts_exchanged_bytes(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> tuple[int, ...]:
    """Bytes that a rank gives to each of the node's all-to-alls, in order; empty without EP.

    Forward: the token counts, the rows, the results. Backward: the gradients of the results, and
    of the rows.
    """
    if expert_parallel_axis(node, option) is None:
        return ()
    tokens, _, _, counts, *_ = _routed(node, operands)
    rows = _local_rows(node, operands, option, mesh)
    exchanged = rows * tokens.shape[-1] * tokens.dtype.itemsize
    if node.phase == "backward":
        return (exchanged, exchanged)
    return (counts.num_bytes, exchanged, exchanged)


def experts_saved_bytes(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> int:
    """Bytes that the forward node keeps for its backward, besides its operands; 0 for backward.

    The rows as they arrived, what each matrix but the last made of them, and the results.
    """
    if node.phase == "backward":
        return 0
    tokens, *_ = operands
    weights = operands[FIRST_WEIGHT_OPERAND:]
    rows = _local_rows(node, operands, option, mesh)
    model_dim = tokens.shape[-1]
    widths = [math.prod(weight.shape[1:]) // model_dim for weight in weights]
    # A gated unit keeps each projection, its activation and their product.
    kept = 2 * model_dim + sum(widths[:-1]) + 2 * (widths[-1] if widths else 0)
    return rows * kept * tokens.dtype.itemsize
