"""Small objects that layouts and metadata are made of, by the names of their classes and fields.

Which classes there may be is a list: placements of DTensor, the paths at which a value has a size
that only a run will tell, symbols of such sizes, and AOTAutograd's descriptors of joint graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt_trace._torch_internals import record_types
from gt_trace.errors import ArtifactError

_METHODS = frozenset({"size", "stride", "storage_offset"})


def encoded_record(encode: Callable[[Any], Any], value: Any) -> Any:
    """An object of one of the classes, whose fields ``encode`` encodes.

    Raises:
        ArtifactError: it is of another.
    """
    name = type(value).__name__
    if name == "Symbol":
        return ["symbol", value.name]
    kind, fields = record_types().get(name, (None, ()))
    if type(value) is not kind:
        raise ArtifactError(f"a {name} cannot be stored: {str(value)[:200]}")
    return ["r", name, *(encode(getattr(value, field)) for field in fields)]


def decoded_record(name: object, values: list[Any]) -> Any:
    """The object that was encoded.

    Raises:
        ArtifactError: there is no such class, or it has other fields.
    """
    known = record_types().get(name) if isinstance(name, str) else None
    if known is None or len(known[1]) != len(values):
        raise ArtifactError(f"there are no stored objects of a class {name!r} with these fields")
    kind, fields = known
    if name == "CallMethodKey" and values[0] not in _METHODS:
        raise ArtifactError(f"no size is what a method {values[0]!r} returns")
    return kind(**dict(zip(fields, values, strict=True)))
