"""The operators that a stored graph may call, found by their qualified names.

Nothing is imported by a name from a file: an operator of PyTorch is looked up among those that are
registered in this process, in namespaces of this list, and must be one that computes tensors. A few
functions of Python, by which sizes are computed, and FlexAttention's operators are named here one
by one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from gt_trace._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    higher_order_operator,
)
from gt_trace.errors import ArtifactError

NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "_c10d_functional",
        "symm_mem",
        "gt_trace",
        "gt_passes",
        "gt_autoparallel",
        "torchtitan",
    }
)
"""Namespaces of operators that a stored graph may call without being asked about."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"operator.{function.__name__}": function
    for function in (
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.truediv,
        operator.mod,
        operator.pow,
        operator.neg,
        operator.pos,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.and_,
        operator.or_,
    )
} | {
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
    "torch.sym_int": torch.sym_int,
    "torch.sym_float": torch.sym_float,
    "torch.sym_not": torch.sym_not,
    "torch.sym_ite": torch.sym_ite,
}
SIZE_FUNCTIONS = {id(function): name for name, function in _FUNCTIONS.items()}
"""Names of the functions of sizes, by identity."""

_HIGHER_ORDER = frozenset({"flex_attention", "flex_attention_backward"})
_WITHOUT_TENSORS = frozenset({"aten::_assert_scalar", "aten::sym_constrain_range_for_size"})
"""Operators that compute no tensor and may be called nevertheless: checks of sizes."""


def operator_name(target: object, namespaces: Collection[str] = NAMESPACES) -> str:
    """The qualified name of what a node calls.

    Raises:
        ArtifactError: a stored graph may not call it.
    """
    if isinstance(target, OpOverload):
        name = f"{target._schema.name}.{target._schema.overload_name or 'default'}"
        find_operator(name, namespaces)
        return name
    if isinstance(target, HigherOrderOperator):
        name = str(target.name())  # type: ignore[no-untyped-call]  # torch's
        if name in _HIGHER_ORDER:
            return f"higher_order::{name}"
    name = SIZE_FUNCTIONS.get(id(target), "")
    if not name:
        shown = getattr(target, "__qualname__", None) or str(target)
        raise ArtifactError(
            f"a stored graph cannot call {shown}: it calls operators of PyTorch and functions of "
            "sizes. Save a graph before code is generated for it"
        )
    return name


def find_operator(name: object, namespaces: Collection[str] = NAMESPACES) -> Callable[..., Any]:
    """The operator of that qualified name, ``aten::mm.default`` say.

    Args:
        name: as ``operator_name`` gives it.
        namespaces: those in which it may be.

    Raises:
        ArtifactError: it is outside of the list, or is not registered in this process.
    """
    if not isinstance(name, str):
        raise ArtifactError(f"an operator is named by text, not by {name!r}")
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition("::")
    if namespace == "higher_order" and rest in _HIGHER_ORDER:
        return higher_order_operator(rest)
    if namespace not in namespaces:
        raise ArtifactError(
            f"a stored graph calls {name!r}, which is not among the operators that it may call: "
            f"those of {', '.join(sorted(namespaces))}, and some functions of sizes"
        )
    packet_name, _, overload_name = rest.partition(".")
    is_name = packet_name.isidentifier()
    packet = getattr(getattr(torch.ops, namespace), packet_name, None) if is_name else None
    overloads: Any = packet.overloads if isinstance(packet, OpOverloadPacket) else tuple
    if overload_name not in overloads():
        raise ArtifactError(
            f"a stored graph calls {name!r}, which is not registered in this process: import what "
            "defines it"
        )
    found: OpOverload = getattr(packet, overload_name)
    arguments = found._schema.arguments
    mentions = [str(each.type) for each in (*arguments, *found._schema.returns)]
    computes = any("Tensor" in kind for kind in mentions)
    if not computes and found._schema.name not in _WITHOUT_TENSORS:
        raise ArtifactError(f"a stored graph calls {name!r}, which computes no tensor")
    if any(each.name == "filename" for each in arguments):
        raise ArtifactError(f"a stored graph calls {name!r}, which opens files")
    return found
