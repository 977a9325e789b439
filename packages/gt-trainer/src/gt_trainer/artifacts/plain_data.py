"""Whatever a graph may depend on, as plain data of which ``gt_config.fingerprint`` can be taken.

Functions are told apart by their names and by what they do: their code, and what they close over.
Of tensors, shape, dtype and layout count; values only of those that a caller calls constants. What
differs between ranks that are alike (ranks, names of process groups, addresses) never enters.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from gt_config.errors import FingerprintTypeError
from gt_trace.capture.code_digest import code_digest
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trainer._torch_internals import FakeTensor, OpOverload
from gt_trainer.artifacts.alike_ranks import spans

_SCALARS = (str, int, float, bool, type(None))
_AS_TEXT = (torch.dtype, torch.layout, torch.memory_format, Placement, OpOverload)


_OPAQUE = frozenset(
    {
        "torch",
        "builtins",
        "gt_trace",
        "gt_passes",
        "gt_pipeline",
        "gt_autoparallel",  # of placed models the plan counts
        "gt_trainer",
    }
)
"""Packages whose objects are told by their classes alone, where any object is taken."""

_MOST_OBJECTS = 2
"""So many objects inside of one another are looked into."""


def plain_data(
    value: object,
    *,
    path: str,
    leave_out: Set[str] = frozenset(),
    meta_device: str = "meta",
    takes_any_object: bool = False,
    is_constant: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> Any:
    """``value`` as mappings, lists, enums, texts and numbers.

    Args:
        value: made of dataclasses, containers, enums, functions, numbers, arrays, tensors,
            placements, meshes and classes. Of a module, only the class counts.
        path: what to call the value in an error.
        leave_out: names of dataclass fields, at any depth, that no graph depends on.
        meta_device: the type of device that a tensor on meta stands for.
        takes_any_object: whether a value of another kind is no error: its class counts then, and
            its attributes, unless it is PyTorch's or this project's.
        is_constant: whether a graph may hold a tensor's values, which count then.

    Raises:
        FingerprintTypeError: names the path of a value of another kind.
    """
    conversion = _Conversion(
        leave_out,
        meta_device=meta_device,
        takes_any_object=takes_any_object,
        is_constant=is_constant,
    )
    return conversion.convert(value, path)


class _Conversion:
    """One conversion; knows what it is inside of, since functions may close over themselves."""

    def __init__(
        self,
        leave_out: Set[str],
        *,
        meta_device: str,
        takes_any_object: bool,
        is_constant: Callable[[torch.Tensor], bool],
    ) -> None:
        self._leave_out = leave_out
        self._meta_device = meta_device
        self._takes_any_object = takes_any_object
        self._is_constant = is_constant
        self._num_objects = 0
        self._above: list[object] = []

    def convert(self, value: object, path: str) -> Any:
        if type(value) in _SCALARS or isinstance(value, Enum):
            return value
        if isinstance(value, _AS_TEXT):
            return repr(value)
        if any(value is each for each in self._above):
            return "what this is inside of"
        self._above.append(value)
        try:
            return self._compound(value, path)
        finally:
            self._above.pop()

    def _compound(self, value: object, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            text = tensor_text(value, meta_device=self._meta_device)
            contents = contents_text(value) if self._is_constant(value) else None
            return text if contents is None else f"{text}, {contents}"
        if isinstance(value, torch.device):
            return value.type  # its index is the rank's
        if isinstance(value, DeviceMesh):
            return {"axes": list(value.mesh_dim_names or ()), "sizes": list(value.shape)}
        if isinstance(value, type):
            return _name(value)
        if isinstance(value, nn.Module):
            return {"module": _name(type(value))}
        if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, functools.partial)):
            return self._function(value, path)
        if dataclasses.is_dataclass(value):
            return {
                "class": _name(type(value)),
                **{
                    field.name: self.convert(getattr(value, field.name), f"{path}.{field.name}")
                    for field in dataclasses.fields(value)
                    if field.compare and field.name not in self._leave_out
                },
            }
        printed = printed_value(value)
        if printed is not None:
            return {"class": _name(type(value)), "value": printed}
        return self._container(value, path)

    def _container(self, value: object, path: str) -> Any:
        if isinstance(value, Mapping):
            return {
                key if type(key) in _SCALARS else self._text(key, f"a key of {path}"): self.convert(
                    inner, f"{path}[{key!r}]"
                )
                for key, inner in value.items()
            }
        if isinstance(value, slice):
            return {"slice": self.convert((value.start, value.stop, value.step), path)}
        if isinstance(value, np.ndarray):
            elements = array_text(value)
            if value.dtype.hasobject:  # whose bytes are addresses
                elements = self.convert((value.shape, value.tolist()), path)
            return {"class": _name(type(value)), "array": elements}
        if isinstance(value, (list, tuple, deque)):
            items = [self.convert(each, f"{path}[{index}]") for index, each in enumerate(value)]
            is_plain = type(value) in (list, tuple, torch.Size)
            return _runs(items) if is_plain else {"class": _name(type(value)), "items": items}
        if isinstance(value, Set):
            return {"set": sorted(self._text(each, f"an element of {path}") for each in value)}
        if self._takes_any_object:
            return self._object(value, path)
        raise FingerprintTypeError(
            f"{path} is of type {_name(type(value))}, and nothing says in what two of these differ"
        )

    def _object(self, value: object, path: str) -> Any:
        name = _name(type(value))
        is_opaque = name.partition(".")[0] in _OPAQUE
        attributes = None if is_opaque else attributes_of(value)
        if attributes is None or self._num_objects == _MOST_OBJECTS:
            return {"class": name}
        self._num_objects += 1
        try:
            held = {key: self.convert(each, f"{path}.{key}") for key, each in attributes.items()}
        finally:
            self._num_objects -= 1
        return {"class": name, "attributes": held}

    def _function(self, function: Any, path: str) -> Any:
        if isinstance(function, functools.partial):
            held = (function.func, function.args, function.keywords)
            return {"partial": self.convert(held, path)}
        if isinstance(function, BuiltinFunctionType):
            return {"builtin": _name(function)}
        if isinstance(function, MethodType):
            of = type(function.__self__)
            return {"of": _name(of), **self._function(function.__func__, path)}
        cells = [
            self.convert(_contents_of(cell), f"{path}, closed over {name!r}")
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            )
        ]
        defaults = (function.__defaults__, function.__kwdefaults__)
        return {
            "function": _name(function),
            "code": code_digest(function.__code__),
            "cells": cells,
            "defaults": self.convert(defaults, f"{path}, defaults"),
        }

    def _text(self, value: object, path: str) -> str:
        """Of what has to be put in order, or to be a key."""
        converted = self.convert(value, path)
        return json.dumps(converted, sort_keys=True, default=repr)


def _contents_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a function that a name will stand for only later
        return "nothing yet"


def tensor_text(tensor: torch.Tensor, *, meta_device: str = "meta") -> str:
    """One line: all that a graph knows of a tensor, on this rank.

    Args:
        tensor: none of its values is read.
        meta_device: the type of device that a tensor on meta stands for.
    """
    device = meta_device if tensor.device.type == "meta" else tensor.device.type
    parts = [f"{tensor.dtype}{_sizes(tensor.shape)} on {device}"]
    if tensor.requires_grad:
        parts.append("requires grad")
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        axes = zip(tensor.placements, mesh.mesh_dim_names or (), mesh.shape, strict=True)
        parts += [f"{placement!r} over {axis} {size}" for placement, axis, size in axes]
        tensor = tensor.to_local()
        parts.append(f"here {_sizes(tensor.shape)}")
    parts.append(f"strides {_sizes(tensor.stride())}")
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        parts.append(_name(type(tensor)))
    return ", ".join(parts)


def folded(named: Mapping[str, str]) -> dict[str, str]:
    """Texts by name, where those of a model's layers are one: ``layers.*.norm`` is "0-5: text".

    Numbers between the dots of a name are what is folded, and nothing is lost.
    """
    families: dict[str, dict[str, list[str]]] = {}
    for name, text in named.items():
        parts = name.split(".")
        numbers = ".".join(part for part in parts if part.isdigit())
        family = ".".join("*" if part.isdigit() else part for part in parts)
        families.setdefault(family, {}).setdefault(text, []).append(numbers)
    return {
        family: "; ".join(
            f"{_spans(numbers)}: {text}" if numbers != [""] else text
            for text, numbers in texts.items()
        )
        for family, texts in families.items()
    }


def _spans(numbers: Sequence[str]) -> str:
    """Return numbers as "0-5", or as "0-6 by 2"; numbers with dots in them one by one."""
    are_plain = all(each.isdecimal() for each in numbers)
    return ", ".join(spans(sorted(map(int, numbers))) if are_plain else numbers)


def _runs(items: list[Any]) -> list[Any]:
    """A list in which equal neighbours, as the layers of a model, stand once with their number."""
    # By text, for 1, 1.0 and True are equal to Python.
    runs = [list(equal) for _, equal in itertools.groupby(items, key=_as_text)]
    if len(runs) == len(items):
        return items
    return [{"count": len(run), "item": run[0]} for run in runs]


def _as_text(item: object) -> str:
    return json.dumps(item, sort_keys=True, default=repr)


def _sizes(sizes: Sequence[int | torch.SymInt]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


# What a value holds that has no attributes to look into, so that two that differ look different.
#
# A number that a forward multiplies by may be of NumPy, or a tensor that is no part of the
# model's state: a graph holds it as a constant. Such values are told by all that they hold.
_BASES = (str, bytes, bytearray, int, float, complex)
"""Of which there are subclasses: a base's text has the whole value, whatever a subclass prints."""

_PRINTED_WHOLE = (range, np.generic, np.dtype, PurePath)


def printed_value(value: object) -> str | None:
    """Of a value whose text says all: that text. None of any other value."""
    for base in _BASES:
        if isinstance(value, base):
            return base.__repr__(value)
    return repr(value) if isinstance(value, _PRINTED_WHOLE) else None


def array_text(array: np.ndarray[Any, Any]) -> str:
    """One line: type of elements, sizes, and a digest of the elements, which are no objects."""
    return f"{array.dtype}{list(array.shape)}, sha256 {hashlib.sha256(array.tobytes()).hexdigest()}"


def contents_text(tensor: torch.Tensor) -> str | None:
    """A digest of the values that this rank has of a tensor; None of one that has no values.

    Args:
        tensor: is copied to the host. One on meta, or of a fake mode, has no values.
    """
    digest = hashlib.sha256()
    leaves, _ = flatten_tensor(tensor)
    with torch.no_grad():
        for leaf in leaves:
            if leaf.device.type == "meta" or isinstance(leaf, FakeTensor):
                return None
            plain = leaf.dequantize() if leaf.is_quantized else leaf
            plain = plain if plain.layout is torch.strided else plain.to_dense()
            plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(f"{plain.dtype}{list(plain.shape)}".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256 {digest.hexdigest()}"


def attributes_of(value: object) -> dict[str, object] | None:
    """Attributes that are set, in ``__dict__`` and in slots; None if there is place for none."""
    held = dict(_slots_of(value))
    if hasattr(value, "__dict__"):
        return {**held, **vars(value)}
    has_slots = any("__slots__" in vars(base) for base in type(value).__mro__)
    return held if has_slots else None


def _slots_of(value: object) -> Iterator[tuple[str, object]]:
    """By the descriptors that ``__slots__`` became: it may be one text, or an iterator at its end.

    Those of base classes come first, so that what a subclass calls the same prevails.
    """
    for base in reversed(type(value).__mro__):
        if "__slots__" not in vars(base):
            continue
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # nothing is set there yet
                    continue
