"""Gradients that the last step left in the parameters of a captured optimizer.

A step that does not clear them adds its own to them. The trace starts without any, and a replay
would too, so that such a step must be refused. Stand-ins get a gradient that no step may read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from gt_trace._torch_internals import get_proxy_mode
from gt_trace.capture.module_state import StateSlot
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trace.errors import CaptureError

_CLEARS = frozenset({torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default})


class EarlierGradients:
    """Gradients that stand-ins have when the step begins, in one trace after another.

    Args:
        slots: where the state lives. Parameters of the optimizer that have a gradient get one.
        optimizer: None if none is captured.
    """

    def __init__(self, slots: Sequence[StateSlot], optimizer: torch.optim.Optimizer | None) -> None:
        groups = () if optimizer is None else optimizer.param_groups
        stepped = {id(each) for group in groups for each in group["params"]}
        self._names = {
            index: slot.entry.name for index, slot in enumerate(slots) if id(slot.tensor) in stepped
        }
        self._given = {index for index in self._names if slots[index].tensor.grad is not None}
        self._nodes: dict[int, list[Node]] = {}
        self.are_more = False
        """Whether the step left others, so that it must be traced again."""

        self.written: tuple[str, ...] = ()
        """Names of the parameters, except those whose gradients the step left untouched."""

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of the parameters that must have no gradient when the step begins."""
        return tuple(name for index, name in self._names.items() if index not in self._given)

    def give(self, state: Sequence[torch.Tensor]) -> None:
        """Give stand-ins of parameters a gradient."""
        self._nodes = {}
        for index in self._given:
            with torch.no_grad():
                state[index].grad = torch.zeros_like(state[index])
            self._nodes[index] = _nodes_of(state[index].grad)

    def take(self, state: Sequence[torch.Tensor]) -> None:
        """Take gradients away after the step ran.

        Raises:
            CaptureError: the step read gradients that it was given; all are listed.
        """
        left = {index for index in self._names if state[index].grad is not None}
        now = {index: _nodes_of(state[index].grad) for index in left}
        self.written = tuple(
            name
            for index, name in self._names.items()
            if index not in left
            or now[index] != self._nodes.get(index)
            or any(node.users for node in now[index])
        )
        zero = {index for index in left if all(map(_is_cleared, now[index]))}
        for index in left:
            state[index].grad = None
        self.are_more = not left <= self._given
        self._given |= left
        read = [
            f"{self._names[index]}.grad"
            for index, nodes in self._nodes.items()
            if index not in zero and any(map(_is_read, nodes))
        ]
        if read:
            raise CaptureError(
                "the step reads gradients that the step before has left, or adds to them, and a "
                "replay would start without; clear them in the step (optimizer.zero_grad()):\n  "
                + "\n  ".join(read)
            )


def _is_read(node: Node) -> bool:
    """Return whether the first operator that is given a gradient does not clear it."""
    first = next(iter(node.users), None)
    return first is not None and first.target not in _CLEARS


def _is_cleared(node: Node) -> bool:
    """Return whether a gradient is zero after the last operator."""
    last = next(iter(reversed(node.users)), node)
    return node.target in _CLEARS or last.target in _CLEARS


def _nodes_of(tensor: Any) -> list[Node]:
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    proxies = [tracer.unwrap_proxy(leaf) for leaf in flatten_tensor(tensor)[0]]
    return [each.node for each in proxies]
