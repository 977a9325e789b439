"""Ways to run the routed experts of one layer on a mesh: few, and known.

Routed experts are one node (``graph/experts.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.experts import (
    FIRST_WEIGHT_OPERAND,
    expert_parallel_axes,
    hidden_dims_of,
)
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec
from gt_autoparallel.rules.mesh_options import combine


def expert_options(
    node: PlacementNode, operands: tuple[TensorSpec, ...], mesh: MeshShape
) -> tuple[NodeOption, ...]:
    """Every way to run a node of kind ``experts`` on a mesh.

    Along one axis: replicated; each rank's own tokens (of the first or the second token dim) with
    all the weights it is given; expert-parallel, each rank having its own tokens and its own
    experts; or tensor-parallel, each rank having all tokens and a part of every expert's hidden
    features. Expert parallelism may be along several axes together, if the order of their ranks in
    one process group, which is by number, is that in which they cut the experts.

    The backward node of a block must run with the option of its forward node; the planner links
    them, since what the forward keeps only its own backward can use.
    """
    is_backward = node.phase == "backward"
    routed = operands[1:] if is_backward else operands
    num_weights = len(routed) - FIRST_WEIGHT_OPERAND
    token_dims = len(routed[0].shape) - 1
    choices: list[AxisOption] = [_axis_option(None, False, num_weights, is_backward)]
    if hidden_dims := hidden_dims_of(node):
        choices.append(_tensor_parallel(hidden_dims, is_backward))
    for dim in range(token_dims):
        choices.append(_axis_option(dim, False, num_weights, is_backward))
        choices.append(_axis_option(dim, True, num_weights, is_backward))
    options = combine(choices, operands, node.outputs, mesh)
    return tuple(o for o in options if _is_in_order(expert_parallel_axes(node, o), mesh))


def _is_in_order(axes: Sequence[int], mesh: MeshShape) -> bool:
    """Whether ranks along all axes, the first one slowest, have rising numbers."""
    return all(
        mesh.strides[slow] >= mesh.sizes[fast] * mesh.strides[fast]
        for slow, fast in itertools.pairwise(axes)
    )


def _tensor_parallel(hidden_dims: Sequence[int], is_backward: bool) -> AxisOption:
    whole, term = Replicate(), Partial("sum")
    weights = tuple(Shard(dim) for dim in hidden_dims)
    operands = (*[whole] * FIRST_WEIGHT_OPERAND, *weights)
    if not is_backward:
        return AxisOption(operands=operands, outputs=(term,))
    return AxisOption(operands=(whole, *operands), outputs=(term, term, *weights))


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
