"""Fake tensors of nodes that are made without a trace, like those of traced ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt_trace._torch_internals import FakeTensor, fake_over_meta, set_conj, set_neg


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def mapped_tensors(value: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A node's value with other tensors in place of its own."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, dict):
        return type(value)({key: mapped_tensors(each, tensor) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return type(value)([mapped_tensors(each, tensor) for each in value])
    return value


def fake_over(like: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
    """A fake tensor over ``element``, of the mode and device of ``like``."""
    assert isinstance(like, FakeTensor)
    made = fake_over_meta(
        element, like.fake_mode, like.fake_device, dispatch_keys=like.dispatch_keys
    )
    if like.is_conj():
        set_conj(made, True)
    if like.is_neg():
        set_neg(made, True)
    return made
