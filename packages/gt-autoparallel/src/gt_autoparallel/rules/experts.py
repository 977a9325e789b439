"""Ways to run the routed experts of one layer on a mesh: replicated, on own tokens, or distributed.

Routed experts are one node (``graph/experts.py``), and their options are few and known.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec
from gt_autoparallel.rules.mesh_options import combine


def expert_options(
    node: PlacementNode, operands: tuple[TensorSpec, ...], mesh: MeshShape
) -> tuple[NodeOption, ...]:
    """Every way to run a node of kind ``experts`` on a mesh.

    Along one axis: replicated; each rank's own tokens (of the first or the second token dim) with
    all the weights it is given; or expert-parallel, each rank having its own tokens and its own
    experts. At most one axis is expert-parallel: token dispatchers know one process group.

    The backward node of a block must run with the option of its forward node; the planner links
    them, since what the forward keeps only its own backward can use.
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
    options = combine(choices, operands, node.outputs, mesh)
    return tuple(o for o in options if o.operands[weights_at].count(Shard(0)) <= 1)


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
