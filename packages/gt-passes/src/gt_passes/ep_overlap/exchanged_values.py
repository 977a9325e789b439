"""Fake values of nodes beside exchanges of tokens, without long sums of sizes while they are made.

A rank receives as many rows as its peers send: a sum of one size for each. Operators ask such a sum
dozens of questions, and SymPy takes milliseconds for each where there are 256 peers. What a
dispatch gave is one symbol from then on (``ShortenedSizes``), and all that is computed of it. What
comes back is as much as went out: that is a number, which operators find out by comparing the two.
Such a sum is short only while an operator runs that does no more than that, if it compares at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gt_passes._torch_internals import value_of
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.node_calls import evaluate
from gt_trace.stamping.shortened_sizes import ShortenedSizes

_CASTS = frozenset({torch.ops.aten._to_copy.default})
"""Of one tensor; there is no other with whose rows they could compare its own."""


class ExchangedValues:
    """Evaluates nodes of one graph in their order, until ``restore``."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._dispatched = ShortenedSizes(shape_env)
        self._returned = ShortenedSizes(shape_env)
        self._written: list[Node] = []
        self._is_off = shape_env is None

    def value(self, node: Node) -> Any:
        """What ``evaluate`` gives, with sums that a dispatch made in short.

        Unless an operator asks or finds what is said of the sum alone: then all are as they are,
        from there on.
        """
        if self._is_off:
            return evaluate(node)
        self._written.append(node)
        returned = _returned_by(node)
        if returned is not None:
            return self._beside(node, *returned)
        found = _evaluated_in_short(node, self._dispatched)
        if found is None:
            self.restore([*self._written, *node.all_input_nodes])
            self._is_off = True
            return evaluate(node)
        (value,) = found
        if is_collective(node) and isinstance(value, torch.Tensor) and value.ndim:
            sent = value_of(node.all_input_nodes[0])
            self._dispatched.shorten(value, is_new=_is_counted(sent))
        return value

    def restore(self, nodes: Iterable[Node]) -> None:
        """Let the values of nodes have the sums again."""
        self._dispatched.restore(map(value_of, nodes))

    def _beside(self, node: Node, returned: torch.Tensor, number: int | None) -> Any:
        """The value of a node, with the rows of one operand in short, which may be a number."""
        self._returned.shorten(returned, is_new=True)
        if number is not None:
            self._returned.tell(returned, number)
        found = _evaluated_in_short(node, self._returned)
        self._returned.restore([returned, *(found or ())])
        return evaluate(node) if found is None else found[0]


def _evaluated_in_short(node: Node, sizes: ShortenedSizes) -> tuple[Any] | None:
    """The value of a node; None if it must be evaluated of whole sums."""
    try:
        value = evaluate(node)
    except Exception:  # noqa: BLE001  # PyTorch knows less of a size that it did not make
        sizes.forget_values()
        return None
    return None if sizes.forget_values() else (value,)


def _returned_by(node: Node) -> tuple[torch.Tensor, int | None] | None:
    """The operand whose rows may be short while a node is evaluated, and what number they are."""
    operands = [value_of(source) for source in node.all_input_nodes]
    tensors = [each for each in operands if isinstance(each, torch.Tensor) and each.ndim]
    if len(tensors) < len(operands) or not tensors:
        return None
    if is_wait(node) or node.target in _CASTS:
        return tensors[0], None
    if node.target is not torch.ops.aten.mul.Tensor or len({each.ndim for each in tensors}) > 1:
        return None
    counted = [each for each in tensors if _is_counted(each)]
    summed = [each for each in tensors if not _is_counted(each)]
    if len(counted) != 1 or len(summed) != 1 or counted[0].shape[0] == 1:
        return None
    number, rows = counted[0].shape[0], cast("Any", summed[0].shape[0])
    if not rows.node.expr.is_Add:
        return None
    torch._check(rows == number)  # as the operator does, of the sum itself
    return summed[0], number


def _is_counted(value: object) -> bool:
    """Whether a value is a tensor of as many rows as a trace knows."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and isinstance(value.shape[0], int)
