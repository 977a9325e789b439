"""Operators that make tensors without reading any: each rank makes its own part.

A tensor of zeros is also a sum of such tensors. Where the operator is given a tensor for its dtype
or shape, that tensor may come in any placement that goes with the result's.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Placement

from gt_autoparallel.graph.options import AxisOption
from gt_autoparallel.rules.dim_labels import PARTIAL, REPLICATE, shard
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, only_whole, rules_of
from gt_autoparallel.rules.pointwise import can_be_partial
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def _constant(call: OperatorCall) -> Iterator[AxisOption]:
    shape = call.output().shape
    if call.operands and can_be_partial(call.operands[0]):
        yield _option(call, PARTIAL, REPLICATE)
    given = call.operands[0].shape if call.operands else ()
    for dim, size in enumerate(shape):
        aligned = dim < len(given) and given[dim] == size
        yield _option(call, shard(dim) if aligned else REPLICATE, shard(dim))


def _zeros(call: OperatorCall) -> Iterator[AxisOption]:
    yield from _constant(call)
    if can_be_partial(call.output()):
        yield _option(call, REPLICATE, PARTIAL)
        if call.operands and can_be_partial(call.operands[0]):
            yield _option(call, PARTIAL, PARTIAL)


def _option(call: OperatorCall, operand: Placement, output: Placement) -> AxisOption:
    return AxisOption(operands=(operand,) * len(call.operands), outputs=(output,))


def _size_to_local(sharded: ShardedCall) -> LocalCall:
    return sharded.with_arguments(size=list(sharded.output_shape()))


RULES: Rules = {
    **rules_of(("zeros", "new_zeros"), _zeros, localize=_size_to_local),
    **rules_of(("zeros_like",), _zeros),
    **rules_of(
        ("empty", "full", "new_empty", "new_full", "new_ones", "ones"),
        _constant,
        localize=_size_to_local,
    ),
    **rules_of(("empty_like", "full_like", "ones_like"), _constant),
    # Values that depend on their place are made whole: cutting off a part costs nothing.
    **rules_of(("arange", "eye", "linspace", "scalar_tensor"), only_whole),
}
