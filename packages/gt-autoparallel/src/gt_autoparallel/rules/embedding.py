"""Embedding tables: sharded by column, by row, or replicated with the indices sharded.

Sharded by row (a vocabulary-parallel table, as Megatron-LM has it), a rank looks up what it has and
gives zeros for the rest: the ranks' results are summands. A rank's part of the gradient needs all
indices and gradients, and is no sum. What runs then depends on the rank's coordinate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gt_autoparallel.graph.options import AxisOption
from gt_autoparallel.rules.dim_labels import PARTIAL, REPLICATE, DimLabels, axis_options, shard
from gt_autoparallel.rules.operator_call import CallOperand, OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, rules_of
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def _embedding(call: OperatorCall) -> Iterator[AxisOption]:
    places = tuple(range(len(call.spec("indices").shape)))
    yield from axis_options(
        DimLabels(operands=((None, "width"), places), outputs=((*places, "width"),))
    )
    yield AxisOption(operands=(shard(0), REPLICATE), outputs=(PARTIAL,))


def _local_embedding(sharded: ShardedCall) -> LocalCall:
    position, count = sharded.operand_shard(0, 0)
    if count == 1:
        return sharded.with_arguments()
    num_rows = sharded.operand_shape(0)[0]
    first = position * num_rows

    def rows_of_rank(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        elsewhere, rows = _rows_here(indices, first, num_rows, otherwise=0)
        found = torch.ops.aten.embedding.default(weight, rows)
        result: torch.Tensor = torch.ops.aten.masked_fill.Scalar(
            found, torch.ops.aten.unsqueeze.default(elsewhere, -1), 0.0
        )
        return result

    return LocalCall(function=rows_of_rank, args=(CallOperand(0), CallOperand(1)))


def _embedding_backward(call: OperatorCall) -> Iterator[AxisOption]:
    places = tuple(range(len(call.spec("indices").shape)))
    summed = frozenset() if call.arguments["scale_grad_by_freq"] else frozenset(places)
    yield from axis_options(
        DimLabels(operands=((*places, "width"), places), outputs=((None, "width"),), summed=summed)
    )
    yield AxisOption(operands=(REPLICATE, REPLICATE), outputs=(shard(0),))


def _local_embedding_backward(sharded: ShardedCall) -> LocalCall:
    position, count = sharded.output_shard(0, 0)
    if count == 1:
        return sharded.with_arguments()
    num_rows = sharded.output_shape()[0]
    first = position * num_rows
    padding = sharded.call.arguments["padding_idx"]
    by_frequency = sharded.call.arguments["scale_grad_by_freq"]

    def gradient_of_rows(gradient: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        # One more row takes what belongs to others: as the padding row it is skipped.
        _, rows = _rows_here(indices, first, num_rows, otherwise=num_rows)
        if padding >= 0:
            is_padding = torch.ops.aten.eq.Scalar(indices, padding)
            rows = torch.ops.aten.masked_fill.Scalar(rows, is_padding, num_rows)
        wide = torch.ops.aten.embedding_dense_backward.default(
            gradient, rows, num_rows + 1, num_rows, by_frequency
        )
        result: torch.Tensor = torch.ops.aten.slice.Tensor(wide, 0, 0, num_rows)
        return result

    return LocalCall(function=gradient_of_rows, args=(CallOperand(0), CallOperand(1)))


def _rows_here(
    indices: torch.Tensor, first: int, num_rows: int, *, otherwise: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which indices are of other ranks, and the rows of all of them in this rank's part."""
    shifted = torch.ops.aten.sub.Tensor(indices, first)
    below = torch.ops.aten.lt.Scalar(shifted, 0)
    above = torch.ops.aten.ge.Scalar(shifted, num_rows)
    elsewhere = torch.ops.aten.logical_or.default(below, above)
    return elsewhere, torch.ops.aten.masked_fill.Scalar(shifted, elsewhere, otherwise)


RULES: Rules = {
    **rules_of(("embedding",), _embedding, localize=_local_embedding),
    **rules_of(
        ("embedding_dense_backward",), _embedding_backward, localize=_local_embedding_backward
    ),
}
