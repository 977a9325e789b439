"""What the routed experts of one layer compute, exchange and keep, at balanced routing."""

from __future__ import annotations

import math

import torch

from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND, expert_parallel_axes
from gt_autoparallel.graph.layouts import MeshShape, local_shape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec


def experts_local_rows(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> int:
    """Rows that a rank sends to experts: its tokens, once for each of their experts.

    At balanced routing an expert-parallel rank receives as many as it sends.
    """
    at = 2 if node.phase == "backward" else 1
    return math.prod(local_shape(operands[at].shape, option.operands[at], mesh))


def experts_exchanged_bytes(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> tuple[int, ...]:
    """Bytes that a rank gives to each of the node's all-to-alls, in order; empty without EP.

    Forward: the token counts, the rows, the results. Backward: the gradients of the results, and
    of the rows.
    """
    if not expert_parallel_axes(node, option):
        return ()
    tokens, _, _, counts, *_ = operands[node.phase == "backward" :]
    rows = experts_local_rows(node, operands, option, mesh)
    exchanged = rows * tokens.shape[-1] * tokens.dtype.itemsize
    if node.phase == "backward":
        return (exchanged, exchanged)
    return (counts.num_bytes, exchanged, exchanged)


def experts_saved_bytes(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> int:
    """Bytes that the forward node keeps for its backward, besides its operands; 0 for backward."""
    return 0 if node.phase == "backward" else experts_inner_bytes(node, operands, option, mesh)


def experts_inner_bytes(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> int:
    """Bytes that a forward makes and its backward reads, of either's node, besides their operands.

    The rows as they arrived, what each matrix but the last made of them, and the results in
    float32, in which they are multiplied by their scores.
    """
    first = FIRST_WEIGHT_OPERAND + (node.phase == "backward")
    tokens, weights = operands[first - FIRST_WEIGHT_OPERAND], operands[first:]
    layouts = option.operands[first:]
    rows = experts_local_rows(node, operands, option, mesh)
    model_dim = tokens.shape[-1]
    widths = [
        math.prod(local_shape(weight.shape, layout, mesh)[1:]) // model_dim
        for weight, layout in zip(weights, layouts, strict=True)
    ]
    # A gated unit keeps each projection, its activation and their product.
    kept = model_dim + sum(widths[:-1]) + 2 * (widths[-1] if widths else 0)
    return rows * (kept * tokens.dtype.itemsize + model_dim * torch.float32.itemsize)


def experts_product_bytes(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> int:
    """Bytes of ``experts_inner_bytes`` that are results of matrix products and exchanges.

    With expert parallelism these are the rows that arrive, and those that come back.
    """
    first = FIRST_WEIGHT_OPERAND + (node.phase == "backward")
    tokens, weights = operands[first - FIRST_WEIGHT_OPERAND], operands[first:]
    layouts = option.operands[first:]
    rows = experts_local_rows(node, operands, option, mesh)
    model_dim = tokens.shape[-1]
    widths = [
        math.prod(local_shape(weight.shape, layout, mesh)[1:]) // model_dim
        for weight, layout in zip(weights, layouts, strict=True)
    ]
    exchanged = 2 * model_dim if expert_parallel_axes(node, option) else 0
    return rows * (sum(widths[:-1]) + model_dim + exchanged) * tokens.dtype.itemsize
