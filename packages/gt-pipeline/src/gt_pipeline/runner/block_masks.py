"""FlexAttention's masks in microbatches: each gets the mask of its own samples.

As PyTorch's pipelines split them (torch/distributed/pipelining/microbatch.py), but for two things.
The number of a microbatch's first sample is a tensor, no number in Python: a graph that was
captured for one microbatch then takes it as an input, and serves all. And nothing is computed anew:
all tensors of a mask have its samples first, so that parts are views.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def is_block_mask(value: object) -> TypeGuard[BlockMask]:
    """Whether a value is such a mask.

    FlexAttention is not imported to know it: that takes seconds, and whoever has a mask did it.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def find_block_mask_problem(mask: BlockMask, dim: int, count: int) -> str | None:
    """Say why a mask cannot be split into ``count`` along ``dim``; None if it can."""
    if dim != 0:
        return (
            f"is a BlockMask and was given dimension {dim}: a part of the queries needs all keys, "
            "so masks are split along samples only: give it 0, or None to pass it whole to every "
            "microbatch"
        )
    size = mask.kv_num_blocks.shape[0]
    if size != 1 and (size == 0 or size % count):
        return f"is a BlockMask of {size} samples, which is no multiple of {count}"
    return None


def split_block_mask(mask: BlockMask, count: int) -> list[BlockMask]:
    """The masks of ``count`` equal parts of the samples; a mask of one sample serves all as it is.

    Their ``mask_mod`` is asked about samples by their index in the part.
    """
    num_samples = mask.kv_num_blocks.shape[0]
    if num_samples == 1:
        return [mask] * count
    size = num_samples // count
    return [_part(mask, first, size) for first in range(0, num_samples, size)]


def _part(mask: BlockMask, first: int, size: int) -> BlockMask:
    part = copy.copy(mask)
    for name, value in vars(mask).items():
        if isinstance(value, Tensor) and value.shape[0] != 1:
            setattr(part, name, value[first : first + size])
    # Its own memory: compiled code may count on how an input is aligned.
    offset = torch.full((), first, dtype=torch.int32, device=mask.kv_num_blocks.device)
    part.mask_mod = _of_samples_from(offset, mask.mask_mod)
    return part


def _of_samples_from(first: Tensor, whole: _MaskMod) -> _MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return whole(b + first, h, q_idx, kv_idx)

    return mask_mod
