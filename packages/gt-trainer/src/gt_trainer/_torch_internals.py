"""Every private torch symbol that gt_trainer uses, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config  # settings of AOTAutograd and its partitioner; no public name
import torch.distributed as dist
import torch.fx.experimental._config  # settings of sizes known at run time; no public name
from torch._ops import OpOverload  # one way to call an operator; no public name
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

__all__ = [
    "OpOverload",
    "is_cuda_lost_by_fork",
    "local_shape_at",
    "process_group_named",
    "torch_settings",
]


def is_cuda_lost_by_fork() -> bool:
    """Say whether this process was forked from one that had initialised the CUDA driver.

    False on a machine without a CUDA device, where asking for one initialises nothing.

    ``torch.cuda.is_initialized`` tells of PyTorch's context only. The driver is initialised
    earlier, by counting devices, and torch keeps a note of that for forked children alone; no
    public function reads it before the first use of CUDA fails.
    """
    return bool(torch.cuda._is_in_bad_fork()) and torch.cuda.device_count() > 0


def process_group_named(name: str) -> dist.ProcessGroup:
    """A process group of this process by its name.

    Functional collectives name their group, and only a private registry knows groups by name.
    """
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    group: dist.ProcessGroup = resolve(name)
    return group


def local_shape_at(tensor: DTensor, coordinates: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor's part on the rank at these coordinates of its mesh.

    The public ``compute_local_shape_and_global_offset`` knows the part of this rank alone.
    """
    shape, _ = _compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh.shape, list(coordinates), tensor.placements, True
    )
    return tuple(shape)


def torch_settings() -> Mapping[str, Mapping[str, Any]]:
    """Every setting by which AOTAutograd traces and cuts and symbols get sizes, by its module."""
    modules: dict[str, Any] = {
        "functorch": torch._functorch.config,
        "symbols": torch.fx.experimental._config,
    }
    return {name: module.get_config_copy() for name, module in modules.items()}
