"""Operators whose derivative rounds otherwise while it is traced: refused.

PyTorch's derivative of ``prod`` divides the product by the operand if no element is zero. Elements
of a traced tensor cannot be read, so that the traced derivative multiplies all other elements.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from gt_trace.capture.inherit import first_forward
from gt_trace.errors import CaptureError
from gt_trace.node_metadata import is_backward, sequence_number

_PRODUCTS = (torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int)


def refuse_traced_derivatives(graph_module: GraphModule) -> None:
    """Refuse gradients of products of all elements.

    Raises:
        CaptureError: lists the line of each product.
    """
    lines: list[str] = []
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        products = [n for n in first_forward(module.graph).values() if _multiplies(n)]
        if products:  # which few graphs have
            numbers = {sequence_number(n) for n in module.graph.nodes if is_backward(n)}
            lines += [_line(each) for each in products if sequence_number(each) in numbers]
    if lines:
        raise CaptureError(
            "the step differentiates torch.prod, whose gradient PyTorch computes by another "
            "formula while it is traced, with other last bits. Multiply the elements one by one "
            "(x[..., 0] * x[..., 1]), or take the last of torch.cumprod:\n  " + "\n  ".join(lines)
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
