"""A forward that autograd recorded, and that keeps nothing of its operands.

Autograd keeps what a backward will read, operands included. Those that a plan gathers or computes
again for the backward would stay alive since the forward, for nobody: the backward is given them
again, and reads those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from gt_autoparallel._torch_internals import shares_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedForward:
    """What is needed to differentiate a forward later, besides its operands."""

    result: GradientEdge
    sources: tuple[GradientEdge, ...]
    """Of the operands by which is differentiated."""

    operands: _OperandsOfBackward

    def gradients(
        self, gradient: torch.Tensor, operands: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run the backward, once.

        Args:
            gradient: of the result.
            operands: equal to those of the forward, in its order.

        Returns:
            The gradient of each operand by which is differentiated.
        """
        self.operands.given = operands
        try:
            return torch.autograd.grad(self.result, self.sources, gradient)
        finally:
            self.operands.given = ()


def record_forward(
    run: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    operands: Sequence[torch.Tensor],
    *,
    differentiate: Collection[int],
) -> tuple[torch.Tensor, RecordedForward]:
    """Run a forward.

    What autograd saves of an operand is let go if it is all of it, with its dims in whatever order.
    Other parts of operands are kept, and so are copies.

    Args:
        run: differentiable; of operands alone.
        operands: whose gradients nobody follows.
        differentiate: positions of operands.

    Returns:
        The result, without its history, and what the backward needs.
    """
    with torch.enable_grad():
        seed = torch.empty((), requires_grad=True)
        tracked = [
            _Source.apply(seed, operand) if position in differentiate else operand
            for position, operand in enumerate(operands)
        ]
        of_backward = _OperandsOfBackward(recorded=operands)
        with saved_tensors_hooks(of_backward.pack, of_backward.unpack):
            result = run(tracked)
    of_backward.recorded = ()
    return result.detach(), RecordedForward(
        result=get_gradient_edge(result),
        sources=tuple(get_gradient_edge(tracked[position]) for position in sorted(differentiate)),
        operands=of_backward,
    )


class _Source(torch.autograd.Function):
    """A tensor with a history of its own; a leaf would be kept by the node of its gradient."""

    @staticmethod
    def forward(ctx: Any, seed: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("gradients are asked for here, and no further")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OperandView:
    """Stands for an operand with its dims in some order."""

    position: int
    """Of the operand."""

    dims: tuple[int, ...]
    """Of the operand, as the view has them."""


@dataclass(slots=True, kw_only=True)
class _OperandsOfBackward:
    """What autograd saves of operands (``saved_tensors_hooks``)."""

    recorded: Sequence[torch.Tensor]
    """Of the forward, while it runs."""

    given: Sequence[torch.Tensor] = ()
    """Of the backward, while it runs."""

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _OperandView:
        for position, operand in enumerate(self.recorded):
            dims = _dims_of_view(saved, operand)
            if dims is not None:
                return _OperandView(position=position, dims=dims)
        return saved

    def unpack(self, packed: torch.Tensor | _OperandView) -> torch.Tensor:
        if isinstance(packed, _OperandView):
            return self.given[packed.position].permute(packed.dims)
        return packed


def _dims_of_view(saved: torch.Tensor, operand: torch.Tensor) -> tuple[int, ...] | None:
    """From each dim of ``saved`` to that of the operand, if both have the same elements."""
    if (
        saved.dtype != operand.dtype
        or saved.dim() != operand.dim()
        or saved.storage_offset() != operand.storage_offset()
        or not shares_memory(saved, operand)
    ):
        return None
    wanted = list(zip(saved.shape, saved.stride(), strict=True))
    there = list(zip(operand.shape, operand.stride(), strict=True))
    orders = itertools.permutations(range(operand.dim()))
    return next((dims for dims in orders if [there[dim] for dim in dims] == wanted), None)
