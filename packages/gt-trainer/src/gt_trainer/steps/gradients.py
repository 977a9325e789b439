"""From the gradients that a captured step returns to ``param.grad``, as autograd would leave them.

A captured step returns gradients as values. Optimizers and gradient clipping read ``param.grad``,
and autograd's own accumulation has a contract: the first gradient is taken as it is if it is laid
out like the parameter and belongs to nobody else, later ones are added in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from gt_trainer.launcher import RunStoppedError


class NonFiniteGradientsError(RunStoppedError):
    """A step's gradients have NaN or infinite elements, on some rank."""


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
            _local(parameter.grad).add_(_local(gradient))


def refuse_non_finite_gradients(
    parameters: Iterable[torch.Tensor], *, step: int, device: torch.device
) -> None:
    """Stop every rank if a gradient on any of them is not finite.

    torchtitan looks at the loss of a step alone, after its update: gradients that are not finite
    under a finite loss would be applied and saved. Waits for the gradients to be computed.

    Args:
        parameters: those of this rank, gradients accumulated and clipped. Clipping makes all
            elements NaN if the norm was NaN, and leaves NaN where an element was infinite.
        step: the step whose update they are for.
        device: where the ranks communicate.

    Raises:
        NonFiniteGradientsError: On every rank.
    """
    gradients = [_local(each.grad) for each in parameters if each.grad is not None]
    # The largest magnitude, NaN if an element is. Of a small parameter, a shard may be empty.
    largest = torch.nn.utils.get_total_norm([each for each in gradients if each.numel()], math.inf)
    is_finite = torch.isfinite(largest).to(device, torch.int32)
    dist.all_reduce(is_finite, dist.ReduceOp.MIN)
    if not is_finite.item():
        raise NonFiniteGradientsError(
            f"step {step}: gradients are not finite (NaN or infinite). Their update was not made, "
            "and nothing of this step was saved.\n"
            "  Often the learning rate is too high "
            "(--optimizer.param_groups.0.optimizer_kwargs.lr),\n"
            "  or its warm-up too short (--lr_scheduler.warmup_steps)"
        )


def _own(parameter: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient, or a copy of it if its memory is another's or laid out otherwise."""
    is_alone = _storage(gradient) not in taken
    if is_alone and _local(gradient).stride() == _local(parameter).stride():
        return gradient
    copy = torch.empty_like(parameter, requires_grad=False)
    _local(copy).copy_(_local(gradient))
    return copy


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory behind a tensor."""
    return _local(tensor).untyped_storage().data_ptr()
