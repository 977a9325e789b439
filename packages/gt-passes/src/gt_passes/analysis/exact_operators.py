"""Operators on one tensor that give a number the same bits alone as among others; two that do not.

Arithmetic that IEEE 754 rounds correctly has one result, whichever loop or vector unit computes it.
``exp2``, ``log2`` or ``pow`` are approximated, and libraries approximate a vector otherwise than a
single number.
"""

from __future__ import annotations

import torch
from torch.fx import Node

_aten = torch.ops.aten

EXACT_OPERATORS = frozenset(
    {
        _aten.abs.default,
        _aten.ceil.default,
        _aten.clamp.default,
        _aten.clamp_max.default,
        _aten.clamp_min.default,
        _aten.div.Tensor,
        _aten.floor.default,
        _aten.mul.Tensor,
        _aten.neg.default,
        _aten.reciprocal.default,
        _aten.sqrt.default,
        _aten.trunc.default,
    }
)
"""Rounded correctly, where all but the first argument are constants. Casts are so, too."""

APPROXIMATED_OPERATORS = frozenset({_aten.exp2.default, _aten.log2.default})
"""By which a power of two is made of a number. Ranks find the same where each computes it alone, by
one build on one kind of device."""


def is_exact(node: Node) -> bool:
    """Whether a node does exact arithmetic, or a cast, to its first argument, by constants."""
    if len(node.all_input_nodes) != 1 or node.args[0] is not node.all_input_nodes[0]:
        return False
    if any(isinstance(argument, Node) for argument in node.args[1:]):
        return False  # the same one again
    return node.target in EXACT_OPERATORS or is_only_a_cast(node)


def is_only_a_cast(node: Node) -> bool:
    """Whether a copy does no more than to cast."""
    return node.target is _aten._to_copy.default and node.kwargs.keys() == {"dtype"}
