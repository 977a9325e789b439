"""Operators that cut, join or pad along dims: those dims stay whole, all others may be sharded.

All of them are linear, and so are the gradients among them.
"""

from __future__ import annotations

from gt_autoparallel.rules.dim_labels import DimLabels, all_but
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall
from gt_autoparallel.rules.views import linear_in_all


def _along_dim(call: OperatorCall) -> DimLabels:
    """``cat``, ``split``, ...: every tensor has the dims of the first operand."""
    labels = all_but(len(call.operands[0].shape), {call.dim()})
    return linear_in_all(call, (labels,) * len(call.operands), (labels,) * len(call.outputs))


def _slice(call: OperatorCall) -> DimLabels:
    """A slice of everything leaves its dim free: its bounds are cut to the piece's size."""
    dim = call.dim()
    whole = {dim} if call.operands[0].shape != call.output().shape else set()
    labels = all_but(len(call.output().shape), whole)
    return linear_in_all(call, (labels,), (labels,))


def _removes_dim(call: OperatorCall) -> DimLabels:
    """``select`` and ``unbind``: outputs lack the dim."""
    dim = call.dim()
    labels = all_but(len(call.operands[0].shape), {dim})
    without = labels[:dim] + labels[dim + 1 :]
    return linear_in_all(call, (labels,), (without,) * len(call.outputs))


def _adds_dim(call: OperatorCall) -> DimLabels:
    """``stack`` and the gradient of ``select``: operands lack the dim."""
    num_dims = len(call.output().shape)
    dim = call.dim(num_dims=num_dims)
    labels = all_but(num_dims, {dim})
    without = labels[:dim] + labels[dim + 1 :]
    return linear_in_all(call, (without,) * len(call.operands), (labels,))


def _select_scatter(call: OperatorCall) -> DimLabels:
    dim = call.dim()
    labels = all_but(len(call.operands[0].shape), {dim})
    return linear_in_all(call, (labels, labels[:dim] + labels[dim + 1 :]), (labels,))


def _pad(call: OperatorCall) -> DimLabels:
    """Padding with anything but zero is not linear."""
    padded = call.arguments["pad"]
    num_dims = len(call.operands[0].shape)
    whole = {num_dims - 1 - index // 2 for index, amount in enumerate(padded) if amount != 0}
    labels = all_but(num_dims, whole)
    if call.arguments["value"]:
        return DimLabels(operands=(labels,), outputs=(labels,))
    return linear_in_all(call, (labels,), (labels,))


def _along_dims(call: OperatorCall) -> DimLabels:
    """``flip`` and ``roll``; rolled without dims, a tensor is rolled as if it were flat."""
    num_dims = len(call.operands[0].shape)
    chosen = call.arguments["dims"] or range(num_dims)
    labels = all_but(num_dims, {dim % num_dims for dim in chosen})
    return linear_in_all(call, (labels,), (labels,))


def _matrices(call: OperatorCall) -> DimLabels:
    """``tril`` and ``triu``: the last two dims are the matrix."""
    num_dims = len(call.operands[0].shape)
    labels = all_but(num_dims, {num_dims - 2, num_dims - 1})
    return linear_in_all(call, (labels,), (labels,))


def _input_sizes_to_local(sharded: ShardedCall) -> LocalCall:
    return sharded.with_arguments(input_sizes=list(sharded.output_shape()))


RULES: Rules = {
    **rules_of(("cat", "split", "split_with_sizes", "slice_scatter"), labelled(_along_dim)),
    **rules_of(("slice",), labelled(_slice)),
    **rules_of(("slice_backward",), labelled(_slice), localize=_input_sizes_to_local),
    **rules_of(("select", "unbind"), labelled(_removes_dim)),
    **rules_of(("stack",), labelled(_adds_dim)),
    **rules_of(("select_backward",), labelled(_adds_dim), localize=_input_sizes_to_local),
    **rules_of(("select_scatter",), labelled(_select_scatter)),
    **rules_of(("constant_pad_nd",), labelled(_pad)),
    **rules_of(("flip", "roll"), labelled(_along_dims)),
    **rules_of(("tril", "triu"), labelled(_matrices)),
}
