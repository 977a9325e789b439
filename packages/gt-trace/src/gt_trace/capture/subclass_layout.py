"""Tensor subclasses taken apart into plain tensors, and put together again.

A captured graph is a function of plain tensors. A wrapper subclass such as ``DTensor`` enters it
as its plain leaves, and what else it holds (mesh, placements, outer shape) stays outside, in a
``TensorLayout``. This is the protocol of ``__tensor_flatten__`` / ``__tensor_unflatten__``
(torch.utils._python_dispatch). Attributes that are not tensors, as the device mesh of a DTensor
in torch 2.15, are kept in the layout as constants: they are identity, not data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import FakeTensor, is_traceable_wrapper_subclass

PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors that a graph of plain tensors computes with alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How a tensor is made of plain leaves.

    A plain tensor has ``subclass=None`` and one leaf.
    """

    subclass: type[torch.Tensor] | None = None
    attributes: tuple[tuple[str, TensorLayout], ...] = ()
    """Inner tensors by attribute name, in the order of their leaves."""

    constants: tuple[tuple[str, Any], ...] = ()
    """Inner attributes that are no tensors, by name."""

    context: Any = None
    """What ``__tensor_flatten__`` returned beside the attribute names."""

    outer_size: tuple[int, ...] = ()
    outer_stride: tuple[int, ...] = ()
    num_leaves: int = 1

    def describe(self) -> str:
        """One line for error messages."""
        if self.subclass is None:
            return "plain tensor"
        return f"{self.subclass.__name__}{list(self.outer_size)} with {self.context!r}"


PLAIN = TensorLayout()


def flatten_tensor(tensor: torch.Tensor) -> tuple[list[torch.Tensor], TensorLayout]:
    """The plain leaves of ``tensor``, and the layout that puts them together again."""
    is_plain = not is_traceable_wrapper_subclass(tensor)
    if is_plain:
        return [tensor], PLAIN
    # Plain attribute access: the type guard's intersection type is impossible to mypy.
    flatten: Any = getattr(tensor, "__tensor_flatten__")  # noqa: B009
    names, context = flatten()
    leaves: list[torch.Tensor] = []
    attributes: list[tuple[str, TensorLayout]] = []
    constants: list[tuple[str, Any]] = []
    for name in names:
        inner = getattr(tensor, name)
        if not isinstance(inner, torch.Tensor):
            constants.append((name, inner))
            continue
        inner_leaves, inner_layout = flatten_tensor(inner)
        leaves.extend(inner_leaves)
        attributes.append((name, inner_layout))
    layout = TensorLayout(
        subclass=type(tensor),
        attributes=tuple(attributes),
        constants=tuple(constants),
        context=context,
        outer_size=tuple(tensor.size()),
        outer_stride=tuple(tensor.stride()),
        num_leaves=len(leaves),
    )
    return leaves, layout


def unflatten_tensor(leaves: Sequence[torch.Tensor], layout: TensorLayout) -> torch.Tensor:
    """The tensor of that layout over ``leaves``: the inverse of ``flatten_tensor``."""
    if layout.subclass is None:
        return leaves[0]
    inner: dict[str, Any] = dict(layout.constants)
    start = 0
    for name, inner_layout in layout.attributes:
        end = start + inner_layout.num_leaves
        inner[name] = unflatten_tensor(leaves[start:end], inner_layout)
        start = end
    wrapped: torch.Tensor = layout.subclass.__tensor_unflatten__(  # type: ignore[attr-defined]  # the protocol of wrapper subclasses, absent from torch.Tensor's stub
        inner, layout.context, torch.Size(layout.outer_size), layout.outer_stride
    )
    return wrapped


def unknown_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has behavior of its own that a graph of plain tensors would lose."""
    kind = type(tensor)
    is_known = kind in PLAIN_TYPES or isinstance(tensor, FakeTensor)
    if is_known or bool(is_traceable_wrapper_subclass(tensor)):
        return False
    # Results of operators on a subclass of Tensor are of the subclass, unlike those on a parameter.
    return type(kind) is not type(nn.Parameter) or any(
        _function(kind, name) != _function(nn.Parameter, name)
        for name in ("__torch_function__", "__torch_dispatch__")
    )


def _function(kind: type, name: str) -> Any:
    method = getattr(kind, name)
    return getattr(method, "__func__", method)
