"""What a value holds that has no attributes to look into, so that two that differ look different.

A number that a forward multiplies by may be of NumPy, or a tensor that is no part of the model's
state: a graph holds it as a constant. Such values are told by all that they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trainer._torch_internals import FakeTensor

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
