"""Operators that compute each element of their outputs from the elements at the same place.

Operands broadcast: their dims are aligned from the last one, and a dim of size 1 stays whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch

from gt_autoparallel.graph.placement_graph import TensorSpec
from gt_autoparallel.rules.dim_labels import DimLabels
from gt_autoparallel.rules.operator_call import CallOperand, OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, labelled, rules_of

_NOT_LINEAR = (
    "abs",
    "addcdiv",
    "addcmul",
    "angle",
    "atan2",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "copy",
    "cos",
    "elu",
    "eq",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "fill",
    "floor",
    "floor_divide",
    "fmod",
    "ge",
    "gelu",
    "gelu_backward",
    "gt",
    "hardswish",
    "hardtanh",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "leaky_relu_backward",
    "lerp",
    "log",
    "log1p",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mish",
    "nan_to_num",
    "native_dropout_backward",
    "ne",
    "pow",
    "reciprocal",
    "relu",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "sgn",
    "sigmoid",
    "sigmoid_backward",
    "sign",
    "silu",
    "silu_backward",
    "sin",
    "softplus",
    "softplus_backward",
    "sqrt",
    "tan",
    "tanh",
    "tanh_backward",
    "threshold_backward",
    "trunc",
    "where",
)


def broadcast_labels(shape: tuple[int, ...], output: tuple[int, ...]) -> tuple[int | None, ...]:
    """Labels of an operand of ``shape`` whose result has shape ``output`` and labels 0, 1, ..."""
    offset = len(output) - len(shape)
    return tuple(
        dim + offset if size == output[dim + offset] else None for dim, size in enumerate(shape)
    )


def broadcast_shape(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of tensors that broadcast."""
    sizes = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(max(dim_sizes) if min(dim_sizes) else 0 for dim_sizes in sizes)[::-1]


def can_be_partial(spec: TensorSpec | None) -> bool:
    """Whether a tensor can be a sum over ranks: truth values cannot."""
    return spec is not None and spec.dtype != torch.bool


def pointwise(call: OperatorCall, linear: tuple[frozenset[int], ...] = ()) -> DimLabels:
    """Every dim of the outputs, which have the same shape."""
    shape = next(spec.shape for spec in call.outputs if spec is not None)
    specs = (*(call.operands[i] for group in linear for i in group), *call.outputs)
    return DimLabels(
        operands=tuple(broadcast_labels(spec.shape, shape) for spec in call.operands),
        outputs=tuple(
            None if spec is None else broadcast_labels(spec.shape, shape) for spec in call.outputs
        ),
        linear=linear if all(can_be_partial(spec) for spec in specs) else (),
    )


def _linear_in_all(call: OperatorCall) -> DimLabels:
    """Also linear in all operands together; a number among them makes it affine."""
    names = ("self", "other")
    numbers = any(
        name in call.arguments and not isinstance(call.arguments[name], CallOperand)
        for name in names
    )
    return pointwise(call, () if numbers else (frozenset(range(len(call.operands))),))


def _product(call: OperatorCall) -> DimLabels:
    """Also linear in a factor, if the other is one number.

    Products of two large tensors are linear in each too, but a partial factor would be moved later
    at the same size, and computed with on every rank until then.
    """
    single = [math.prod(spec.shape) == 1 for spec in call.operands]
    if len(single) == 1:
        return pointwise(call, (frozenset({0}),))
    largest = math.prod(call.output().shape)
    linear = tuple(
        frozenset({index})
        for index in (0, 1)
        if single[1 - index] and math.prod(call.operands[index].shape) == largest
    )
    return pointwise(call, linear)


def _quotient(call: OperatorCall) -> DimLabels:
    """Also linear in the dividend, if the divisor is one number and nothing is rounded."""
    by_tensor = len(call.operands) == 2
    divides_tensor = call.index("self") == 0
    rounds = call.arguments.get("rounding_mode") is not None
    if by_tensor and math.prod(call.operands[1].shape) != 1:
        return pointwise(call)
    return pointwise(call, (frozenset({0}),) if divides_tensor and not rounds else ())


def _conversion(call: OperatorCall) -> DimLabels:
    """Also linear, if every value of the old dtype is one of the new dtype.

    Rounding each rank's summand to a narrower dtype is not rounding the sum.
    """
    exact = torch.promote_types(call.operands[0].dtype, call.output().dtype) == call.output().dtype
    return pointwise(call, (frozenset({0}),) if exact else ())


def _linear(call: OperatorCall) -> DimLabels:
    return pointwise(call, (frozenset({0}),))


RULES: Rules = {
    **rules_of(("add", "sub"), labelled(_linear_in_all)),
    **rules_of(("mul",), labelled(_product)),
    **rules_of(("div",), labelled(_quotient)),
    **rules_of(("_to_copy",), labelled(_conversion)),
    **rules_of(
        (
            "_conj",
            "_conj_physical",
            "alias",
            "clone",
            "detach",
            "imag",
            "lift_fresh_copy",
            "neg",
            "positive",
            "real",
        ),
        labelled(_linear),
    ),
    **rules_of(_NOT_LINEAR, labelled(pointwise)),
}
