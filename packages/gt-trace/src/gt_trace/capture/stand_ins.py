"""Stand-ins of state and arguments: Python reads of them what it reads of the live tensors.

The tensors of a trace are fakes of one class. A step may ask whether one is a parameter, read an
attribute that was set on it, or compare its type. So stand-ins have the attributes of the live
tensors, and ``type(x)`` in the user's code returns the type that the tensor has in eager execution.
"""

from __future__ import annotations

import builtins
import copy
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gt_trace._torch_internals import (
    FakeTensor,
    FunctionalTensor,
    is_traceable_wrapper_subclass,
    storage_key,
)
from gt_trace.capture.subclass_layout import PLAIN_TYPES

_TRACED = (FakeTensor, FunctionalTensor)
_TYPE = "_gt_trace_type"
_OF_PARAMETER = "_is_param"
"""The attribute by which PyTorch recognizes parameters of other classes than ``nn.Parameter``."""


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what Python set on a tensor, except marks of dynamic dims."""
    held: dict[str, Any] = getattr(tensor, "__dict__", {})
    return {
        key: value
        for key, value in held.items()
        if not key.startswith("_dynamo") and key not in _MARKS
    }


def compared_attributes(argument: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of an argument that each call must have, as its capture had them."""
    if not is_live(argument):
        return {}
    return {
        key: value
        for key, value in user_attributes(argument).items()
        if key not in _OF_TORCH and not isinstance(value, torch.Tensor)
    }


def reserved_attributes(tensor: torch.Tensor) -> list[str]:
    """Return attributes that no stand-in can have, since tensors of a trace use their names."""
    if not is_live(tensor):
        return []
    return [
        key
        for key in user_attributes(tensor)
        if key in _RESERVED or (hasattr(FakeTensor, key) and not hasattr(torch.Tensor, key))
    ]


_OF_TORCH = frozenset({_OF_PARAMETER, "_is_buffer", "persistent"})
_MARKS = frozenset({"_specialize_on", "_has_dynamo_dim_marking"})
_RESERVED = frozenset(
    {"constant", "dispatch_keys", "fake_device", "fake_mode", "pytype", "real_tensor", _TYPE}
)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no wrapper of others."""
    return not is_traceable_wrapper_subclass(tensor)


def is_live(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain, and no tensor of a trace."""
    return is_plain(tensor) and not isinstance(tensor, _TRACED)


def liken(stand_in: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Give a stand-in the attributes of a live tensor, and its class as far as Python sees it."""
    held = stand_in.__dict__
    for key, value in user_attributes(original).items():
        held.setdefault(key, value)
    if is_plain(original) and isinstance(original, nn.Parameter):
        held[_OF_PARAMETER] = True
    kind = type(original)
    if kind not in PLAIN_TYPES and is_live(original):
        _give_class(stand_in, kind)
    return stand_in


class _Likened(type(nn.Parameter)):  # type: ignore[misc]  # the metaclass of parameters
    """The metaclass of likened classes: each equals the class of the trace that it extends.

    PyTorch refuses tensors whose class equals none of those that it knows.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is cls.__bases__[0]

    __hash__ = type.__hash__


def _give_class(tensor: torch.Tensor, kind: Any) -> None:
    """Let a traced tensor have the methods of a subclass of ``nn.Parameter``, too."""
    tensor.__dict__[_TYPE] = kind
    own: dict[str, Any] = {"__module__": kind.__module__}
    if kind.__deepcopy__ is nn.Parameter.__deepcopy__:
        own["__deepcopy__"] = copied
    tensor.__class__ = _Likened(kind.__name__, (type(tensor), kind), own)


def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return what ``copy.deepcopy`` returns for a tensor, as a traced tensor.

    A copy of a parameter has neither gradient nor attributes; one of another tensor has both.
    """
    if id(tensor) in memo:
        known: torch.Tensor = memo[id(tensor)]
        return known
    is_parameter = isinstance(tensor, nn.Parameter)
    with torch.no_grad():
        made = tensor.clone() if is_parameter else _copied_memory(tensor, memo)
    memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    if is_parameter:
        made.__dict__[_OF_PARAMETER] = True
        if _TYPE in tensor.__dict__:
            _give_class(made, tensor.__dict__[_TYPE])
        return made
    if tensor.grad is not None:
        made.grad = copied(tensor.grad, memo)
    for key, value in user_attributes(tensor).items():
        if key not in made.__dict__:
            made.__dict__[key] = copy.deepcopy(value, memo)
    return made


def _copied_memory(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a copy in copied memory, which copies of other tensors in that memory share."""
    key = "memory", storage_key(tensor)
    form = tensor.shape, tensor.stride(), tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    made = tensor.clone()
    if key not in memo and (made.stride(), size) == (form[1], tensor.numel()):
        memo[key] = made
        return made
    if key not in memo:
        memo[key] = tensor.as_strided((size,), (1,), 0).clone()
    copied: torch.Tensor = memo[key].as_strided(*form)
    return copied


class _EagerType(type):
    """The class of what replaces ``type``; behaves as ``type`` does, except for traced tensors."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = builtins.type(*args, **kwargs)
        if len(args) > 1:
            return found
        if found is builtins.type:
            return cls
        if issubclass(found, _TRACED):
            return _eager_type(args[0])
        return found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, builtins.type)


class _Type(type, metaclass=_EagerType):
    """Replaces ``type`` in the user's code while a step is traced."""

    __class_getitem__: Any = classmethod(types.GenericAlias)


def _eager_type(tensor: torch.Tensor) -> type:
    is_parameter = _OF_PARAMETER in tensor.__dict__
    known: type = tensor.__dict__.get(_TYPE, nn.Parameter if is_parameter else torch.Tensor)
    return known


@contextmanager
def eager_types(readers: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Let ``type(x)`` return inside what it returns in eager execution.

    Args:
        readers: globals of the modules whose code names ``type``.
    """
    changed = [held for held in readers if "type" not in held]
    try:
        for held in changed:
            held["type"] = _Type
        yield
    finally:
        for held in changed:
            held.pop("type", None)


@contextmanager
def hashed_as(live: Mapping[int, int]) -> Iterator[None]:
    """Let stand-ins have the hashes of live tensors inside, so that a lookup compares the two.

    A dictionary or a set of the module's tensors, made before the step, has live tensors as keys.
    Without this, a lookup of a stand-in would find nothing, in silence.

    Args:
        live: ids of live tensors by the ids of their stand-ins.
    """
    kind: Any = torch.Tensor
    outer = kind.__hash__
    kind.__hash__ = lambda tensor: live.get(id(tensor)) or outer(tensor)
    try:
        yield
    finally:
        kind.__hash__ = outer
