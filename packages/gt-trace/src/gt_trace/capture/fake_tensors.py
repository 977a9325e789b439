"""Fake tensors of nodes that are made without a trace, like those of traced ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gt_trace._torch_internals import (
    FakeTensor,
    fake_over_meta,
    set_conj,
    set_neg,
    storage_key,
    traced_tensors,
)


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


def forget_written_literals(
    func: Any, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Forget the values of tensor literals that an operator writes, and those of their views.

    PyTorch knows the value of a literal (``torch.tensor(0.0)``) while it traces, for ``.item()``,
    and forgets that of an operator's result alone if the value depends on other tensors.

    Args:
        func: operator that is about to run.
        args: its operands, as fake tensors.
        kwargs: likewise.
    """
    if not func._schema.is_mutable:
        return
    known = traced_tensors()
    operands = tensors_in([*args, *kwargs.values()])
    slots = [known[each] for each in operands if each in known]
    constants = {storage_key(each.constant) for each in slots if each.constant is not None}
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if not constants or not (is_random or any(each.constant is None for each in slots)):
        return
    for tensor, slot in [*known.items()]:
        if slot.constant is not None and storage_key(slot.constant) in constants:
            known[tensor] = replace(slot, constant=None)
            if isinstance(tensor, FakeTensor):
                tensor.constant = None


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
