"""From the gradients that a captured step returns to ``param.grad``, as autograd would leave them.

A captured step returns gradients as values. Optimizers and gradient clipping read ``param.grad``,
and autograd's own accumulation has a contract: the first gradient is taken as it is if it is laid
out like the parameter, later ones are added in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

__all__ = ["accumulate_gradients"]


def accumulate_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Add ``gradients`` to the ``.grad`` of ``parameters``, in place where there is one.

    Args:
        parameters: leaves, in the order of the gradients.
        gradients: one for each parameter, of its shape, dtype and placement; None where the loss
            does not depend on it, which leaves ``.grad`` alone.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = _laid_out_like(parameter, gradient)
        else:
            _local(parameter.grad).add_(_local(gradient))


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if _local(gradient).stride() == _local(parameter).stride():
        return gradient
    copy = torch.empty_like(parameter, requires_grad=False)
    _local(copy).copy_(_local(gradient))
    return copy


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
