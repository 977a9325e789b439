"""The update of a step on the parts of parameters and gradients that this rank holds.

Clipping multiplies every element by one number, and Adam treats each element for itself: on each
rank's part they are what they are on the whole, with the same bits. PyTorch's lists of DTensors
find the layouts of a list tensor by tensor when an operator first meets it, which was a quarter of
a start that loads its graph. The norm is another matter: parts are reduced in an order that is
DTensor's, and stay with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from gt_trainer.device_transfer import local_part

_EXPERTS_AXIS = "ep"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    second_copies: Collection[nn.Parameter],
    pp_mesh: DeviceMesh | None,
    ep_enabled: bool,
) -> torch.Tensor:
    """As torchtitan's ``clip_grad_norm_``, second copies scaled like the first and not counted.

    Source: torchtitan/distributed/utils.py, 0.3.0.

    Args:
        parameters: all of this rank's.
        max_norm: to which gradients are scaled down.
        second_copies: those of them that are, as ``settle_tied_weight`` says.
        pp_mesh: over which squares are summed; None without a pipeline.
        ep_enabled: whether parameters of experts lie on a mesh of their own.

    Returns:
        The norm before clipping, a scalar.
    """
    gradients = [(id(each), each.grad) for each in parameters if each.grad is not None]
    uncounted = {id(each) for each in second_copies}
    counted = [gradient for number, gradient in gradients if number not in uncounted]
    # A rank with nothing else still takes part in the sum.
    norm = _norm(
        counted or [torch.zeros_like(each) for each in second_copies], ep_enabled=ep_enabled
    )
    if pp_mesh is not None:
        norm **= 2.0
        dist.all_reduce(norm, group=pp_mesh.get_group())
        norm **= 0.5
    torch.nn.utils.clip_grads_with_norm_(
        # Of the parameters it reads nothing, and a gradient may lie otherwise than its own.
        [_with_gradient(local_part(gradient), gradient) for _, gradient in gradients],
        max_norm,
        norm,
        foreach=True,
    )
    return norm


def update_parameters(optimizers: OptimizersContainer[Any]) -> None:
    """Make a step of all optimizers, ``on_local_parts``."""
    with on_local_parts(optimizers):
        optimizers.step()


@contextmanager
def on_local_parts(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside, Adam and AdamW update plain tensors: this rank's parts of parameters and state.

    Afterwards they hold the parameters that they held before, and state that lies as these do.
    Hooks of an optimizer's own steps see the parts, too. Left alone is an optimizer of another
    kind, one that leaves to PyTorch how it runs (``foreach`` and ``fused`` None), and one with a
    gradient that lies otherwise than its parameter.

    Args:
        optimizers: those that make a step inside.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if _can_run_on_parts(optimizer):
                stack.enter_context(_on_parts(optimizer))
        yield


def _norm(gradients: list[Any], *, ep_enabled: bool) -> torch.Tensor:
    """The 2-norm over all ranks but those of other stages."""
    if not ep_enabled:
        return _whole(torch.nn.utils.get_total_norm(gradients, foreach=True))
    of_experts = [each for each in gradients if _EXPERTS_AXIS in each.device_mesh.mesh_dim_names]
    others = [each for each in gradients if _EXPERTS_AXIS not in each.device_mesh.mesh_dim_names]
    norms = [
        _whole(torch.nn.utils.get_total_norm(each, foreach=True)) for each in (of_experts, others)
    ]
    norm = norms[0] ** 2.0 + norms[1] ** 2.0
    norm **= 0.5
    return norm


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _with_gradient(part: torch.Tensor, gradient: torch.Tensor | None) -> nn.Parameter:
    """A parameter in the memory of a part, with this rank's part of the gradient."""
    parameter = nn.Parameter(part)
    parameter.grad = None if gradient is None else local_part(gradient)
    return parameter


def _can_run_on_parts(optimizer: Optimizer) -> bool:
    if type(optimizer) not in (Adam, AdamW):  # a class derived from them may do anything
        return False
    if any(group["foreach"] is None and group["fused"] is None for group in optimizer.param_groups):
        return False  # PyTorch chooses by the class of the tensors
    placed = [p for p in _updated(optimizer) if isinstance(p, DTensor)]
    moments = [
        (p, moment)
        for p in placed
        for name, moment in optimizer.state.get(p, {}).items()
        if name in _MOMENTS
    ]
    return bool(placed) and all(
        isinstance(other, DTensor)
        and other.device_mesh == p.device_mesh
        and other.placements == p.placements
        and not any(each.is_partial() for each in p.placements)
        for p, other in [*((p, p.grad) for p in placed), *moments]
    )


def _updated(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@contextmanager
def _on_parts(optimizer: Optimizer) -> Iterator[None]:
    parts: dict[torch.Tensor, nn.Parameter] = {
        p: _with_gradient(local_part(p), p.grad)
        for p in _updated(optimizer)
        if isinstance(p, DTensor)
    }
    state, parameters = optimizer.state, [group["params"] for group in optimizer.param_groups]
    of_parts: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for p, of_parameter in state.items():
        part = parts.get(p)
        if part is None:
            of_parts[p] = of_parameter
            continue
        of_parts[part] = {
            name: local_part(value) if name in _MOMENTS else value
            for name, value in of_parameter.items()
        }
    optimizer.state = of_parts
    for group in optimizer.param_groups:
        group["params"] = [parts.get(p, p) for p in group["params"]]
    try:
        yield
    finally:
        optimizer.state = state
        for group, of_group in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = of_group
        _keep_new_state(state, of_parts, parts)


def _keep_new_state(
    state: defaultdict[torch.Tensor, Any],
    of_parts: defaultdict[torch.Tensor, Any],
    parts: dict[torch.Tensor, nn.Parameter],
) -> None:
    """What a first step made; later ones change it in place."""
    wholes: dict[torch.Tensor, torch.Tensor] = {part: p for p, part in parts.items()}
    for part, of_part in of_parts.items():
        p = wholes.get(part, part)
        for name, value in of_part.items():
            if name not in state[p]:
                is_placed = part in wholes and name in _MOMENTS
                state[p][name] = _placed_like(p, value) if is_placed else value


def _placed_like(parameter: Any, part: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
