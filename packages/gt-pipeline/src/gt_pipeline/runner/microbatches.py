"""Splitting what a caller gives to a step into microbatches.

Every microbatch has the same shapes: stages are captured for one, and receive buffers are made for
one. So nothing is ever padded or split unevenly; what does not divide is refused.
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gt_pipeline.errors import MicrobatchError
from gt_pipeline.runner.stage_protocol import MicrobatchInputs

# Of the same meaning in every microbatch. Whatever else is no tensor must be told how to split.
_REPEATED = (bool, int, float, complex, str, bytes, type(None))

_Split: TypeAlias = list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchDims:
    """Along which dimension each input is split. None: every microbatch gets the whole input.

    An input may be a tensor, or tuples, lists and dicts of tensors, all split alike. Numbers,
    strings and None are the same for every microbatch without being told. FlexAttention's
    ``BlockMask`` is split along its samples, dimension 0; one of a single sample serves all.
    """

    args: tuple[int | None, ...] | None = None
    """The dimension along which each positional argument is split; not given: 0 for all."""

    kwargs: Mapping[str, int | None] = field(default_factory=dict)
    """The dimension along which each keyword argument is split; one that is missing is split along
    0."""

    target: int | None = 0


def split_microbatches(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    num_microbatches: int,
    dims: MicrobatchDims,
) -> list[MicrobatchInputs]:
    """The inputs of each microbatch of a step; tensors are views of what was given.

    Raises:
        MicrobatchError: an input cannot be split evenly, or nothing says how; all are listed.
    """
    problems: list[str] = []
    if dims.args is not None and len(dims.args) != len(args):
        problems.append(
            f"the dimensions are those of {len(dims.args)} positional arguments, "
            f"and there are {len(args)}"
        )
    if unknown := sorted(set(dims.kwargs) - set(kwargs)):
        problems.append(
            f"dimensions are given for keyword arguments {unknown}, which are not passed; "
            f"passed are {sorted(kwargs)}"
        )
    if problems:
        raise MicrobatchError(what=_headline(num_microbatches), problems=problems)

    args_dims = (0,) * len(args) if dims.args is None else dims.args

    def split(value: Any, dim: int | None, name: str) -> _Split:
        return _split(value, dim, name, num_microbatches, problems)

    split_args = [
        split(value, dim, f"argument {position}")
        for position, (value, dim) in enumerate(zip(args, args_dims, strict=True))
    ]
    split_kwargs = {
        name: split(value, dims.kwargs.get(name, 0), f"argument {name!r}")
        for name, value in kwargs.items()
    }
    split_target = split(target, dims.target, "the target")
    if problems:
        raise MicrobatchError(what=_headline(num_microbatches), problems=problems)
    return [
        MicrobatchInputs(
            args=tuple(each[index] for each in split_args),
            kwargs={name: each[index] for name, each in split_kwargs.items()},
            target=split_target[index],
        )
        for index in range(num_microbatches)
    ]


def _headline(num_microbatches: int) -> str:
    return f"these inputs do not split into {num_microbatches} microbatches"


def _split(value: Any, dim: int | None, name: str, count: int, problems: list[str]) -> _Split:
    """One value for each microbatch; None for each, and a problem, where that cannot be."""
    if dim is None or isinstance(value, _REPEATED):
        return [value] * count
    if isinstance(value, Tensor):
        return _split_tensor(value, dim, name, count, problems)
    if is_block_mask(value):
        problem = find_block_mask_problem(value, dim, count)
        if problem is None:
            return split_block_mask(value, count)
        problems.append(f"{name} {problem}")
        return [None] * count
    if isinstance(value, Mapping):
        parts = {
            key: _split(each, dim, f"{name}[{key!r}]", count, problems)
            for key, each in value.items()
        }
        return [{key: each[index] for key, each in parts.items()} for index in range(count)]
    if isinstance(value, (tuple, list)):
        elements = [
            _split(each, dim, f"{name}[{position}]", count, problems)
            for position, each in enumerate(value)
        ]
        rebuild = _like(value)
        return [rebuild([each[index] for each in elements]) for index in range(count)]
    problems.append(
        f"{name} is a {type(value).__name__}, which has no known dimensions: "
        "give it None to pass it whole to every microbatch, or split it before"
    )
    return [None] * count


def _split_tensor(tensor: Tensor, dim: int, name: str, count: int, problems: list[str]) -> _Split:
    if not -tensor.dim() <= dim < tensor.dim():
        problems.append(
            f"{name} has shape {tuple(tensor.shape)}, so there is no dimension {dim} to split: "
            "give it another, or None to pass it whole to every microbatch"
        )
        return [None] * count
    size = tensor.shape[dim]
    if size == 0 or size % count:
        allowed = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
        problems.append(
            f"{name} has size {size} along dimension {dim}, which is no multiple of {count}; "
            f"numbers of microbatches that divide it: {allowed or 'none'}"
        )
        return [None] * count
    return list(tensor.chunk(count, dim))


def _like(value: tuple[Any, ...] | list[Any]) -> Callable[[list[Any]], Any]:
    if isinstance(value, list):
        return list
    if hasattr(value, "_make"):  # a named tuple
        return value._make  # type: ignore[no-any-return] # its type is that of the caller's class
    return tuple


# FlexAttention's masks in microbatches: each gets the mask of its own samples.
#
# As PyTorch's pipelines split them (torch/distributed/pipelining/microbatch.py), but for two
# things. The number of a microbatch's first sample is a tensor, no number in Python: a graph
# that was captured for one microbatch then takes it as an input, and serves all. And nothing is
# computed anew: all tensors of a mask have its samples first, so that parts are views.
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
