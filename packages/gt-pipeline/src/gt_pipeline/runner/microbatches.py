"""Splitting what a caller gives to a step into microbatches.

Every microbatch has the same shapes: stages are captured for one, and receive buffers are made for
one. So nothing is ever padded or split unevenly; what does not divide is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from gt_pipeline.errors import MicrobatchError
from gt_pipeline.runner.block_masks import (
    find_block_mask_problem,
    is_block_mask,
    split_block_mask,
)
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
