"""Flattens plain data to canonical text, one entry a field, found by reflection.

Two values flatten alike exactly if they mean the same: the class of every dataclass and enum is
part of the text; ``1``, ``1.0``, ``True`` and ``"1"`` differ, as values and as mapping keys; floats
are written exactly, so that ``0.0`` and ``-0.0`` differ and NaN equals itself. Insertion order of
mappings means nothing, and lists and tuples are both sequences. Whatever has no such text (sets,
arrays, functions, subclasses of the plain types) is refused by path instead of guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from gt_config.errors import FingerprintTypeError
from gt_config.graph_neutral import is_graph_neutral

_text_of = json.JSONEncoder(ensure_ascii=False).encode  # made once: json.dumps makes one a call
_ALLOWED = "dataclasses, mappings, lists, tuples, enums, str, int, float, bool and None"


def flatten(value: object, *, path: str) -> dict[str, str]:
    """Canonical text of every field in ``value``, keyed by its path.

    Containers have an entry too, with their class or their length, so that an empty one shows.
    Fields of dataclasses that are marked ``graph_neutral`` are left out.

    Args:
        value: the data.
        path: the name of the root, with which every path begins.

    Raises:
        FingerprintTypeError: names the path of a value that has no canonical text.
    """
    entries: dict[str, str] = {}
    _flatten(value, path=path, entries=entries, above=())
    return entries


def _flatten(value: object, *, path: str, entries: dict[str, str], above: tuple[int, ...]) -> None:
    if id(value) in above:
        raise FingerprintTypeError(f"{path} contains itself, so it has no canonical form")
    inside = (*above, id(value))
    if is_dataclass(value) and not isinstance(value, type):
        entries[path] = _class_name(value)
        for field in fields(value):
            if not is_graph_neutral(field):
                inner = getattr(value, field.name)
                _flatten(inner, path=f"{path}.{field.name}", entries=entries, above=inside)
    elif isinstance(value, Mapping):
        entries[path] = f"mapping of {len(value)}"
        for key, inner in value.items():
            key_path = f"{path}[{_scalar(key, path=f'a key of {path}')}]"
            _flatten(inner, path=key_path, entries=entries, above=inside)
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries[path] = f"sequence of {len(value)}"
        for index, inner in enumerate(value):
            _flatten(inner, path=f"{path}[{index}]", entries=entries, above=inside)
    else:
        entries[path] = _scalar(value, path=path)


def _scalar(value: object, *, path: str) -> str:
    if isinstance(value, Enum):
        return f"{_class_name(value)}.{value.name}"
    if value is None or type(value) is bool or type(value) is int:
        return _text_of(value)
    if type(value) is float:
        return repr(value)
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FingerprintTypeError(f"{path} is {value!r}, which is no valid Unicode") from None
        return _text_of(value)
    raise FingerprintTypeError(
        f"{path} is of type {_class_name(value)}, which has no canonical form; "
        f"give plain data: {_ALLOWED}"
    )


def _class_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
