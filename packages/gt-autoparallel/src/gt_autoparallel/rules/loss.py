"""Negative log likelihood, and assertions on values."""

from __future__ import annotations

from collections.abc import Iterator

from gt_autoparallel.options import AxisOption
from gt_autoparallel.rules.dim_labels import PARTIAL, REPLICATE, shard
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, rules_of

__all__ = ["RULES"]

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of the argument ``reduction``."""


def _nll_loss(call: OperatorCall) -> Iterator[AxisOption]:
    """Samples may be sharded. A sum over them is partial; a mean divides by all of their weight.

    What the operator returns besides the loss is the weight that a mean divides by.
    """
    replicated = (REPLICATE,) * len(call.operands)
    yield AxisOption(operands=replicated, outputs=(REPLICATE, REPLICATE))
    reduction = call.arguments["reduction"]
    has_samples = len(call.spec("self").shape) == 2
    if has_samples and reduction != _MEAN:
        yield AxisOption(
            operands=(shard(0), shard(0), *replicated[2:]),
            outputs=(PARTIAL, PARTIAL) if reduction == _SUM else (shard(0), REPLICATE),
        )


def _nll_loss_backward(call: OperatorCall) -> Iterator[AxisOption]:
    """Each sample's gradient is its own; only a mean looks at the total weight."""
    replicated = (REPLICATE,) * len(call.operands)
    yield AxisOption(operands=replicated, outputs=(REPLICATE,))
    if len(call.spec("self").shape) != 2:
        return
    reduction = call.arguments["reduction"]
    gradient = shard(0) if reduction == _NONE else REPLICATE
    weight = replicated[4:]
    yield AxisOption(
        operands=(gradient, shard(0), shard(0), *weight, REPLICATE), outputs=(shard(0),)
    )
    if reduction == _SUM:
        yield AxisOption(
            operands=(gradient, shard(0), shard(0), *weight, PARTIAL), outputs=(shard(0),)
        )


def _replicated(call: OperatorCall) -> Iterator[AxisOption]:
    yield AxisOption(
        operands=(REPLICATE,) * len(call.operands),
        outputs=tuple(None if spec is None else REPLICATE for spec in call.outputs),
    )


RULES: Rules = {
    **rules_of(("nll_loss_forward",), _nll_loss),
    **rules_of(("nll_loss_backward",), _nll_loss_backward),
    **rules_of(("_assert_async",), _replicated),
}
