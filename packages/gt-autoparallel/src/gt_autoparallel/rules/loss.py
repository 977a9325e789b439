"""Losses, and assertions on values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gt_autoparallel.graph.options import AxisOption
from gt_autoparallel.rules.dim_labels import PARTIAL, REPLICATE, DimLabels, shard
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, only_whole, rules_of
from gt_autoparallel.rules.pointwise import broadcast_labels, broadcast_shape, pointwise
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of the argument ``reduction``."""


def _nll_loss(call: OperatorCall) -> Iterator[AxisOption]:
    """Samples may be sharded. A sum over them is partial; a mean divides by all of their weight.

    What the operator returns besides the loss is the weight that a mean divides by.
    """
    replicated = (REPLICATE,) * len(call.operands)
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
    if len(call.spec("self").shape) != 2:
        return
    reduction = call.arguments["reduction"]
    gradient = shard(0) if reduction == _NONE else REPLICATE
    for total in (REPLICATE, PARTIAL) if reduction == _SUM else (REPLICATE,):
        yield AxisOption(
            operands=(gradient, shard(0), shard(0), *replicated[4:], total), outputs=(shard(0),)
        )


def _squared_error(call: OperatorCall) -> DimLabels:
    """Pointwise; reduced, it is a sum over every dim, of which a mean is a part (see below)."""
    shape = _error_shape(call)
    reduced = call.arguments["reduction"] != _NONE
    return DimLabels(
        operands=tuple(broadcast_labels(spec.shape, shape) for spec in call.operands),
        outputs=(broadcast_labels(call.output().shape, shape),),
        summed=frozenset(range(len(shape))) if reduced else frozenset(),
    )


def _error_shape(call: OperatorCall) -> tuple[int, ...]:
    given, wanted = call.spec("self").shape, call.spec("target").shape
    return broadcast_shape((given, wanted))


def _mean_of_global(sharded: ShardedCall) -> LocalCall:
    """A mean is the sum of what this rank has, over the number of elements that all ranks have."""
    if sharded.call.arguments["reduction"] != _MEAN:
        return sharded.with_arguments()
    count = math.prod(_error_shape(sharded.call))

    def part_of_mean(self: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
        total = torch.ops.aten.mse_loss.default(self, target, _SUM)
        mean: torch.Tensor = torch.ops.aten.div.Scalar(total, count)
        return mean

    return sharded.with_arguments(part_of_mean, reduction=_SUM)


def _mean_of_global_backward(sharded: ShardedCall) -> LocalCall:
    if sharded.call.arguments["reduction"] != _MEAN:
        return sharded.with_arguments()
    count = math.prod(_error_shape(sharded.call))

    def backward(
        gradient: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int
    ) -> torch.Tensor:
        scaled = torch.ops.aten.div.Scalar(gradient, count)
        result: torch.Tensor = torch.ops.aten.mse_loss_backward.default(scaled, self, target, _SUM)
        return result

    return sharded.with_arguments(backward)


RULES: Rules = {
    **rules_of(("mse_loss",), labelled(_squared_error), localize=_mean_of_global),
    **rules_of(("mse_loss_backward",), labelled(pointwise), localize=_mean_of_global_backward),
    **rules_of(("nll_loss_forward",), _nll_loss),
    **rules_of(("nll_loss_backward",), _nll_loss_backward),
    **rules_of(("_assert_async",), only_whole),
}
