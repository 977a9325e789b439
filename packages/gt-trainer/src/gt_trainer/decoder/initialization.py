"""Initial weights on CPU that do not depend on how the model is sharded.

DTensor keeps one random stream for a whole mesh only where the device has a random generator per
device, which the CPU has not (``torch/distributed/tensor/_random.py``). There each rank fills its
own shard from the common seed, so that all shards of a weight are *equal*: a matrix of four
repeated blocks, and another model for every number of ranks. So on CPU each rank draws the whole
tensor from the common seed, and keeps its part: the same model on one rank and on many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.protocols.module import Module

Initializer = Callable[[torch.Tensor], object]


def draw_whole_weights(model: nn.Module) -> None:
    """Let the instances of ``model`` initialize sharded CPU parameters from whole tensors.

    Wraps the initializers that torchtitan's configurations give each module. Ranks must have equal
    seeds. Costs memory for one whole parameter at a time.
    """
    for module in model.modules():
        if not isinstance(module, Module) or not module._param_init:
            continue
        module._param_init = {
            name: partial(_initialize, initializer)
            for name, initializer in module._param_init.items()
        }


def _initialize(initializer: Initializer, parameter: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor) or parameter.device.type != "cpu":
        initializer(parameter)
        return
    # What an initializer leaves alone (a tied weight that its twin initializes) stays.
    unset = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
    initializer(unset)
    if torch.isnan(unset).all():
        return
    copy_part(unset, parameter)


def copy_part(whole: torch.Tensor, parameter: torch.Tensor) -> None:
    """Fill a parameter, sharded or not, with this rank's part of a whole tensor."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(_part(whole, parameter))
        else:
            parameter.copy_(whole)


def _part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Cut this rank's part in DTensor's order: from the first axis to the last.

    But a strided shard is cut after the axes behind it: it is FSDP's, of a dim that tensor or
    expert parallelism has cut.
    """
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the parameter's mesh")
    axes = range(like.device_mesh.ndim)
    strided = [axis for axis in axes if hasattr(like.placements[axis], "split_factor")]
    for axis in (*(axis for axis in axes if axis not in strided), *reversed(strided)):
        placement = like.placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(f"a parameter is placed as {placement}; allowed: sharded, replicated")
        size = whole.shape[dim]
        chunk = -(-size // like.device_mesh.size(axis))
        start = min(coordinate[axis] * chunk, size)
        whole = whole.narrow(dim, start, min(chunk, size - start))
    return whole
