"""From the gradients that a captured step returns to ``param.grad``, as autograd would leave them.

A captured step returns gradients as values. Optimizers and gradient clipping read ``param.grad``,
and autograd's own accumulation has a contract: the first gradient is taken as it is if it is laid
out like the parameter and belongs to nobody else, later ones are added in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gt_trainer.device_transfer import local_part


def accumulate_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Add ``gradients`` to the ``.grad`` of ``parameters``, in place where there is one.

    Args:
        parameters: leaves, in the order of the gradients.
        gradients: one for each parameter, of its shape, dtype and placement; None where the loss
            does not depend on it, which leaves ``.grad`` alone.
    """
    # Two parameters that are only ever added have one and the same gradient, which clipping would
    # scale twice.
    taken = {_storage(parameter) for parameter in parameters}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = _own(parameter, gradient, taken)
            taken.add(_storage(parameter.grad))
        else:
            local_part(parameter.grad).add_(local_part(gradient))


def _own(parameter: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient, or a copy of it if its memory is another's or laid out otherwise."""
    is_alone = _storage(gradient) not in taken
    if is_alone and local_part(gradient).stride() == local_part(parameter).stride():
        return gradient
    copy = torch.empty_like(parameter, requires_grad=False)
    local_part(copy).copy_(local_part(gradient))
    return copy


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory behind a tensor."""
    return local_part(tensor).untyped_storage().data_ptr()
