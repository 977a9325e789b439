"""Every private torch symbol that gt_trainer uses, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config  # settings of AOTAutograd and its partitioner; no public name
import torch.distributed as dist
import torch.fx.experimental._config  # settings of sizes known at run time; no public name
from torch._ops import OpOverload  # one way to call an operator; no public name
from torch._subclasses import FakeTensor  # a tensor without values; no public name

# The public ``FileSystemWriter`` is a stager of asynchronous saves, too, by which states on a GPU
# are copied to the host otherwise than without a writer of one's own.
from torch.distributed.checkpoint.filesystem import _FileSystemWriter as PlainFileSystemWriter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

# By which torchtitan divides tokens and masks among ranks that share a sequence; without a public
# name.
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    _HeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "FakeTensor",
    "OpOverload",
    "PlainFileSystemWriter",
    "block_mask_of_first_rank",
    "head_tail_order",
    "is_cuda_lost_by_fork",
    "local_shape_at",
    "process_group_named",
    "round_robin_order",
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


def head_tail_order(seq_len: int, num_ranks: int, device: torch.device | str) -> torch.Tensor:
    """(1, L) tokens in the order of ranks, each with a part of the head and one of the tail."""
    order: torch.Tensor = _HeadTailLoadBalancer(seq_len, num_ranks, device)._generate_indices()
    return order


def round_robin_order(mask: BlockMask, num_ranks: int) -> torch.Tensor:
    """(B, L) tokens in the order of ranks, each with blocks that have as many keys as others'."""
    order: torch.Tensor = _PTRRLoadBalancer(mask, num_ranks)._generate_indices()
    return order


class _RanksOnMeta:
    """Of a mesh, what a mask is divided by; a mesh of tensors on meta cannot be made."""

    device_type = "meta"

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def size(self) -> int:
        return self._num_ranks

    def get_local_rank(self) -> int:
        return 0


def block_mask_of_first_rank(mask: BlockMask, num_ranks: int, balancer: str | None) -> BlockMask:
    """On meta, the first rank's part of a mask, as torchtitan divides it among ranks.

    Args:
        mask: of whole sequences, on meta.
        num_ranks: that share them.
        balancer: "headtail", "ptrr" or None.
    """
    balancers: dict[str | None, Any] = {
        None: lambda: None,
        "headtail": lambda: _HeadTailLoadBalancer(mask.seq_lengths[0], num_ranks, "meta"),
        "ptrr": lambda: _PTRRLoadBalancer(mask, num_ranks),
    }
    ranks: Any = _RanksOnMeta(num_ranks)
    (part,) = _context_parallel_shard(ranks, [mask], [2], balancers[balancer]())
    assert isinstance(part, BlockMask)
    return part
