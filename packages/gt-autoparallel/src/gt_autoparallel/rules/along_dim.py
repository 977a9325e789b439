"""Operators that work along one dim, independently at every place of the others."""

from __future__ import annotations

from gt_autoparallel.rules.dim_labels import DimLabels, all_but
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of


def _along_dim(call: OperatorCall) -> DimLabels:
    labels = all_but(len(call.operands[0].shape), {call.dim()})
    return DimLabels(operands=(labels,) * len(call.operands), outputs=(labels,) * len(call.outputs))


RULES: Rules = {
    **rules_of(
        (
            "_log_softmax",
            "_log_softmax_backward_data",
            "_safe_softmax",
            "_softmax",
            "_softmax_backward_data",
            "argsort",
            "cummax",
            "cumprod",
            "cumsum",
            "glu",
            "glu_backward",
            "kthvalue",
            "logcumsumexp",
            "sort",
            "topk",
        ),
        labelled(_along_dim),
    ),
}
