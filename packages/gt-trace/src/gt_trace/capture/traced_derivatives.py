"""Derivatives that PyTorch computes otherwise while they are traced.

Formulas in C++ call other operators for a tensor that is traced than for a real one: they cannot
read its elements, and do not write to it. Zeros get other signs, sums other orders, and results
other strides. A trace records the operators of eager execution instead, or is refused. Formulas of
tensor subclasses are the same eagerly, and are left.

The derivative of ``prod`` divides the product by the operand if no element is zero, and multiplies
all other elements if it is traced. So does that of ``cumprod`` in the first supported versions, and
where it is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gt_trace._torch_internals import OpOverload, is_derivative_of
from gt_trace.capture.grad_mode_operators import WITH_GRAD_MODE
from gt_trace.capture.inherit import first_forward
from gt_trace.capture.kernel_strides import order_in_memory
from gt_trace.capture.singular_values import WITHOUT_VECTORS
from gt_trace.capture.stack_traces import line_of_user
from gt_trace.errors import CaptureError
from gt_trace.node_metadata import is_backward, sequence_number

_FILLED_IN_PLACE = frozenset(
    {"Atan2", "Clamp", "ClampMax", "ClampMin", "Fmax", "Fmin", "Maximum", "Minimum"}
)
_SHARED_BY_EQUALS = frozenset({"Max", "Median", "Min", "Nanmedian"})
_PRODUCTS = (
    torch.ops.aten.prod.default,
    torch.ops.aten.prod.dim_int,
    torch.ops.aten.cumprod.default,
)


def _masked_fill(operand: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    """Keep the strides of the operand, as ``masked_fill_`` does: ``masked_fill`` does not."""
    if not is_derivative_of(_FILLED_IN_PLACE):
        return NotImplemented
    order = order_in_memory(operand)
    if order is None or order == (*range(operand.dim()),):
        return NotImplemented
    mask = mask.expand(operand.shape).permute(order)
    back = [order.index(dim) for dim in range(operand.dim())]
    return operand.permute(order).masked_fill(mask, value).permute(back)


def _mul(mask: torch.Tensor, share: Any) -> Any:
    """Fill zeros with the share of each greatest element, instead of a product with the mask."""
    if mask.dtype is not torch.bool or not is_derivative_of(_SHARED_BY_EQUALS):
        return NotImplemented
    _refuse_second_derivative()
    return share.new_zeros(mask.shape).masked_fill(mask, share)


def _where(mask: torch.Tensor, gradient: torch.Tensor, zero: torch.Tensor) -> Any:
    """Select what is to be summed, instead of a sum over zeros too."""
    if not is_derivative_of(("MaskedFill",)):
        return NotImplemented
    _refuse_second_derivative()
    return gradient.masked_select(mask)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # autograd records the operator that is replaced
        raise CaptureError(
            "the step differentiates a gradient (create_graph=True) of the greatest, least or "
            "median element, or of the value of masked_fill, which PyTorch computes by another "
            "formula while it is traced, with other last bits. Use amax, amin or torch.where:\n"
            + line_of_user()
        )


def _random(tensor: torch.Tensor, low: int, high: int | None, **options: Any) -> torch.Tensor:
    """Draw by an operator whose name Python can read; that of ``random_(low, high)`` is `from`."""
    if high is None or options.get("generator") is not None:
        raise CaptureError(
            "a graph cannot call random_ with a lower bound and a generator, or without an upper "
            f"bound:\n{line_of_user()}\nGive both bounds and no generator, or use torch.randint"
        )
    return torch.randint_like(tensor, low, high)


def _random_in_place(
    tensor: torch.Tensor, low: int, high: int | None, **options: Any
) -> torch.Tensor:
    return tensor.copy_(_random(tensor, low, high, **options))


EAGER_OPERATORS: dict[OpOverload, Callable[..., Any]] = {
    **WITH_GRAD_MODE,
    **WITHOUT_VECTORS,
    getattr(torch.ops.aten.random, "from"): _random,
    getattr(torch.ops.aten.random_, "from"): _random_in_place,
    torch.ops.aten.masked_fill.Scalar: _masked_fill,
    torch.ops.aten.mul.Tensor: _mul,
    torch.ops.aten.where.self: _where,
}
"""A decomposition table for traces."""


def refuse_traced_derivatives(graph_module: GraphModule) -> None:
    """Refuse gradients of products that are computed without a division, as eager ones are not.

    Raises:
        CaptureError: lists the line of each product.
    """
    lines: list[str] = []
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        products = [each for each in first_forward(module.graph).values() if _multiplies(each)]
        for product in products:  # which few graphs have
            number = sequence_number(product)
            nodes = [n for n in module.graph.nodes if sequence_number(n) == number]
            called = {each.target for each in nodes if is_backward(each)}
            divides = torch.ops.aten.div.Tensor in called
            if called and not (divides and torch.ops.aten.stack.default not in called):
                lines.append(_line(product))
    if lines:
        raise CaptureError(
            "the step differentiates torch.prod or torch.cumprod, whose gradient this PyTorch "
            "computes by another formula while it is traced, with other last bits. Multiply the "
            "elements one by one (x[..., 0] * x[..., 1]), or add logarithms of positive ones:\n  "
            + "\n  ".join(lines)
        )


def _multiplies(node: Node) -> bool:
    if node.target not in _PRODUCTS:
        return False
    operand = node.args[0]
    assert isinstance(operand, Node)
    return bool(operand.meta["val"].dim())  # a product of one element has no second formula


def _line(product: Node) -> str:
    trace: str = product.meta.get("stack_trace") or product.name
    return trace.strip().splitlines()[-1].strip()
