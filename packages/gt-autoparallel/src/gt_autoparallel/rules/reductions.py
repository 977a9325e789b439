"""Operators that reduce dims: sums over a sharded dim are partial, all others need it whole."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gt_autoparallel.graph.options import AxisOption
from gt_autoparallel.rules.dim_labels import DimLabels, Labels, all_but, axis_options
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of
from gt_autoparallel.rules.pointwise import can_be_partial
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def reduced_dims(call: OperatorCall) -> tuple[int, ...]:
    """The dims that a call reduces: those of ``dim``, or all without it."""
    num_dims = len(call.operands[0].shape)
    dims = call.arguments.get("dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(num_dims))
    chosen = dims if isinstance(dims, list | tuple) else (dims,)
    return tuple(dim % num_dims for dim in chosen) if num_dims else ()


def _kept(call: OperatorCall) -> tuple[Labels, Labels]:
    """Labels of operand and outputs if reduced dims carry none."""
    operand = all_but(len(call.operands[0].shape), reduced_dims(call))
    if call.arguments.get("keepdim"):
        return operand, operand
    return operand, tuple(label for label in operand if label is not None)


def _sum(call: OperatorCall) -> DimLabels:
    operand = tuple(range(len(call.operands[0].shape)))
    _, output = _kept(call)
    return DimLabels(
        operands=(operand,),
        outputs=(output,),
        summed=frozenset(reduced_dims(call)),
        linear=(frozenset({0}),) if can_be_partial(call.operands[0]) else (),
    )


def _batch_dims(call: OperatorCall) -> DimLabels:
    """Every dim that is not reduced."""
    operand, output = _kept(call)
    return DimLabels(operands=(operand,), outputs=(output,) * len(call.outputs))


def _mean_of_global(sharded: ShardedCall) -> LocalCall:
    """The sum of what this rank has, over the number of elements that all ranks have."""
    dims = reduced_dims(sharded.call)
    shape = sharded.call.operands[0].shape
    if all(sharded.operand_shape(0)[dim] == shape[dim] for dim in dims):
        return sharded.with_arguments()
    count = math.prod(shape[dim] for dim in dims)

    def mean_of_piece(
        self: torch.Tensor,
        dim: object = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        total = torch.ops.aten.sum.dim_IntList(self, dims, keepdim, dtype=dtype)
        mean: torch.Tensor = torch.ops.aten.div.Scalar(total, count)
        return mean

    return sharded.with_arguments(mean_of_piece)


def _histogram(call: OperatorCall) -> Iterable[AxisOption]:
    """``histc``: counts of what lies between bounds; by default the bounds are the data's own."""
    if call.arguments["min"] == call.arguments["max"]:
        return ()
    dims = tuple(range(len(call.operands[0].shape)))
    return axis_options(DimLabels(operands=(dims,), outputs=((None,),), summed=frozenset(dims)))


RULES: Rules = {
    **rules_of(("histc",), _histogram),
    **rules_of(("sum",), labelled(_sum)),
    **rules_of(("mean",), labelled(_sum), localize=_mean_of_global),
    **rules_of(
        (
            "all",
            "amax",
            "amin",
            "any",
            "argmax",
            "argmin",
            "linalg_vector_norm",
            "logsumexp",
            "max",
            "min",
            "prod",
            "std",
            "var",
            "var_mean",
        ),
        labelled(_batch_dims),
    ),
}
