"""Limits of the numbers that a stored graph may compute with functions of sizes.

``operator.pow`` and ``operator.mul`` take numbers of any size, lists and texts. A few
nodes in a file could so ask for more memory or time than there is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node

from gt_trace._torch_internals import OpOverload
from gt_trace.errors import ArtifactError

MAX_INTEGER = 2**64
"""The largest magnitude of an integer in a document."""

_MAX_BITS = 4_096
_SIZE_BITS = 64


class SizeArithmetic:
    """The number of bits that each function of sizes in a graph may have, for nodes in order."""

    def __init__(self, functions: Mapping[int, str]) -> None:
        self._functions = functions
        """Names of the functions, by identity."""

        self._bits: dict[Node, int] = {}

    def check(self, node: Node) -> None:
        """Compute the bits of a node's result from those of its operands.

        Raises:
            ArtifactError: A function of sizes reads what is no number, or its result may be too
                large.
        """
        if id(node.target) not in self._functions:
            return
        target: Any = node.target
        args: Sequence[Any] = node.args
        if node.kwargs:
            raise ArtifactError(f"node {node.name!r} calls a function of sizes with keywords")
        if target is operator.getitem:
            if len(args) != 2 or not isinstance(args[0], Node) or type(args[1]) is not int:
                raise ArtifactError(f"node {node.name!r} reads no item of another node's result")
            return
        bits = [self._of(node, each) for each in args]
        if target is operator.mul:
            most = sum(bits)
        elif target is operator.pow:
            exponent: Any = args[1] if len(args) == 2 else None
            if type(exponent) not in (int, float):
                raise ArtifactError(f"node {node.name!r} has an exponent that is no number")
            most = int(bits[0] * max(1.0, abs(exponent)))
        else:
            most = max(bits, default=0) + 1
        if most > _MAX_BITS:
            raise ArtifactError(
                f"node {node.name!r} computes a number of up to {most} bits; sizes have at most "
                f"{_MAX_BITS}"
            )
        self._bits[node] = most

    def _of(self, node: Node, operand: Any) -> int:
        if type(operand) in (int, bool):
            return int(operand).bit_length()
        if type(operand) is float:
            return _SIZE_BITS
        if isinstance(operand, Node) and not _gives_several(operand):
            return self._bits.get(operand, _SIZE_BITS)
        raise ArtifactError(f"node {node.name!r} computes with what is no number: {operand!r:.100}")


def _gives_several(node: Node) -> bool:
    """Return whether a node's result may be a list or a tuple."""
    if node.op in ("placeholder", "get_attr"):
        return False
    if not isinstance(node.target, OpOverload):
        return not callable(node.target) or hasattr(node.target, "dispatch")
    returns = node.target._schema.returns
    return len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
