"""Checks a value against the small set of type hints that configuration fields use.

Python does not enforce hints, and a configuration written in Python (not parsed from flags) can
hold anything. Configuration dataclasses and node annotations both validate by reflection through
this one function, so that a new field is checked from the day it is declared.
"""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SCALAR_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "None",
}


_HINTS_OF_CLASS: dict[type, dict[str, Any]] = {}


def field_hints(cls: type) -> dict[str, Any]:
    """The resolved type hint of each field of the dataclass ``cls``, in declaration order.

    Remembered, because annotations are read once for each node of graphs with 10^4 to 10^5 nodes.
    """
    if cls not in _HINTS_OF_CLASS:
        hints = get_type_hints(cls)
        _HINTS_OF_CLASS[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _HINTS_OF_CLASS[cls]


def join_words(words: list[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def describe_hint(hint: Any) -> str:
    """What the hint allows, in words for an error message.

    Raises:
        TypeError: the hint is outside the set that configuration fields may use.
    """
    origin = get_origin(hint)
    if origin is Literal:
        return join_words([repr(choice) for choice in get_args(hint)])
    if origin in (Union, UnionType):
        return join_words([describe_hint(arm) for arm in get_args(hint)])
    if origin is tuple and get_args(hint) == (str, ...):
        return "a tuple of strings"
    if hint in _SCALAR_WORDS:
        return _SCALAR_WORDS[hint]
    raise TypeError(f"configuration fields do not use the type hint {hint!r}")


def matches_hint(value: object, hint: Any) -> bool:
    """Whether ``value`` is exactly what the hint says.

    ``bool`` is not accepted as an integer (``True`` is a mistake for a degree), and an integer is
    accepted where a ``float`` is asked for.

    Raises:
        TypeError: the hint is outside the set that configuration fields may use.
    """
    origin = get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if origin in (Union, UnionType):
        return any(matches_hint(value, arm) for arm in get_args(hint))
    if origin is tuple and get_args(hint) == (str, ...):
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint in _SCALAR_WORDS:
        return isinstance(value, hint)
    raise TypeError(f"configuration fields do not use the type hint {hint!r}")
