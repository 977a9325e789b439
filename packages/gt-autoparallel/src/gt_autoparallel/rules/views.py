"""Operators that give elements other places or copies: reshapes, permutations, expansions.

All of them are linear. A reshape splits and joins dims; the first dim of each group of dims that
are split or joined can be sharded, since its pieces are contiguous on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gt_autoparallel.rules.dim_labels import DimLabels, Labels
from gt_autoparallel.rules.operator_call import CallOperand, OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of
from gt_autoparallel.rules.pointwise import broadcast_labels, can_be_partial
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def linear_in_all(
    call: OperatorCall, operands: Sequence[Labels], outputs: Sequence[Labels]
) -> DimLabels:
    """Labels of an operator that is linear in all of its operands together."""
    partial = all(can_be_partial(spec) for spec in call.operands)
    return DimLabels(
        operands=tuple(operands),
        outputs=tuple(outputs),
        linear=(frozenset(range(len(call.operands))),) if partial else (),
    )


def joint_leading_dims(source: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of dims that a reshape from ``source`` to ``target`` can shard together.

    The dims larger than 1 fall into groups of equal size on both sides, as small as possible; the
    first dims of a group are a pair. ``(8, 6) -> (2, 4, 6)``: (0, 0) and (1, 2).
    """
    if math.prod(source) == 0:
        return ()
    left = [dim for dim, size in enumerate(source) if size != 1]
    right = [dim for dim, size in enumerate(target) if size != 1]
    pairs = []
    i = j = 0
    while i < len(left) and j < len(right):
        pairs.append((left[i], right[j]))
        left_size, right_size = source[left[i]], target[right[j]]
        i, j = i + 1, j + 1
        while left_size != right_size:
            if left_size < right_size:
                left_size, i = left_size * source[left[i]], i + 1
            else:
                right_size, j = right_size * target[right[j]], j + 1
    return tuple(pairs)


def _reshape(call: OperatorCall) -> DimLabels:
    source, target = call.operands[0].shape, call.output().shape
    pairs = joint_leading_dims(source, target)
    of_source, of_target = dict(pairs), {out: out for _, out in pairs}
    return linear_in_all(
        call,
        (tuple(of_source.get(dim) for dim in range(len(source))),),
        (tuple(of_target.get(dim) for dim in range(len(target))),),
    )


def _reshape_to_local(sharded: ShardedCall) -> LocalCall:
    """``reshape`` and not ``view``: redistribution may leave other strides than the global ones.

    It is also right where a piece has size 1 and the whole has not: squeezing would remove it.
    """
    return LocalCall(
        function=torch.ops.aten.reshape.default,
        args=(CallOperand(0), list(sharded.output_shape())),
    )


def _permutation(call: OperatorCall) -> DimLabels:
    num_dims = len(call.operands[0].shape)
    order = list(range(num_dims))
    if "dims" in call.arguments:
        order = [dim % num_dims for dim in call.arguments["dims"]]
    elif "dim0" in call.arguments:
        first, second = call.dim("dim0"), call.dim("dim1")
        order[first], order[second] = order[second], order[first]
    else:
        order.reverse()
    return linear_in_all(call, (tuple(range(num_dims)),), (tuple(order),))


def _expand(call: OperatorCall) -> DimLabels:
    shape = call.output().shape
    labels = broadcast_labels(call.operands[0].shape, shape)
    return linear_in_all(call, (labels,), (tuple(range(len(shape))),))


def _expand_to_local(sharded: ShardedCall) -> LocalCall:
    return sharded.with_arguments(size=list(sharded.output_shape()))


def _repeat(call: OperatorCall) -> DimLabels:
    repeats = call.arguments["repeats"]
    offset = len(repeats) - len(call.operands[0].shape)
    output = tuple(
        dim if dim >= offset and count == 1 else None for dim, count in enumerate(repeats)
    )
    return linear_in_all(call, (output[offset:],), (output,))


def _view_as_dtype(call: OperatorCall) -> DimLabels:
    """Bits read as another dtype; of another size, they are of the last dim together."""
    source, target = call.operands[0].shape, call.output().shape
    num_dims = len(target)
    labels = tuple(range(num_dims if source == target else num_dims - 1))
    labels_of_all = labels + (None,) * (num_dims - len(labels))
    return DimLabels(operands=(labels_of_all,), outputs=(labels_of_all,))


def _view_as_complex(call: OperatorCall) -> DimLabels:
    labels = tuple(range(len(call.output().shape)))
    return linear_in_all(call, ((*labels, None),), (labels,))


def _view_as_real(call: OperatorCall) -> DimLabels:
    labels = tuple(range(len(call.operands[0].shape)))
    return linear_in_all(call, (labels,), ((*labels, None),))


RULES: Rules = {
    **rules_of(
        ("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view.default"),
        labelled(_reshape),
        localize=_reshape_to_local,
    ),
    **rules_of(("permute", "t", "transpose"), labelled(_permutation)),
    **rules_of(("expand",), labelled(_expand), localize=_expand_to_local),
    **rules_of(("repeat",), labelled(_repeat)),
    **rules_of(("view.dtype",), labelled(_view_as_dtype)),
    **rules_of(("view_as_complex",), labelled(_view_as_complex)),
    **rules_of(("view_as_real",), labelled(_view_as_real)),
}
