"""Dataclasses from the JSON values of their fields, each of the kind that its annotation says.

What a plan is compared with, added up or printed as has to be a number or a name, whoever wrote the
file. Only plain kinds are looked at, and mappings; what is made of other dataclasses is not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gt_autoparallel.errors import PlanMismatchError

_T = TypeVar("_T")
_PLAIN = (bool, int, float, str, NoneType, Mapping)


def of_fields(kind: type[_T], content: Mapping[str, Any]) -> _T:
    """The dataclass ``kind`` with the fields in ``content``.

    Raises:
        PlanMismatchError: a value is of another kind than its field; names every such field.
        TypeError: there are other fields, or too few.
    """
    of_class: Any = kind
    kinds = _plain_kinds(of_class)
    problems = [
        f"{name} is {value!r}; allowed: {' or '.join(each.__name__ for each in kinds[name])}"
        for name, value in content.items()
        if name in kinds and not any(_is_of(value, each) for each in kinds[name])
    ]
    if problems:
        raise PlanMismatchError(f"{kind.__name__}: {'; '.join(problems)}")
    return kind(**content)


@functools.cache
def _plain_kinds(kind: type) -> dict[str, tuple[type, ...]]:
    """For each field that may only be of plain kinds: these."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        origin = get_origin(hint)
        kinds = (origin,) if origin is Mapping else get_args(hint) or (hint,)
        if all(each in _PLAIN for each in kinds):
            found[name] = kinds
    return found


def _is_of(value: object, kind: type) -> bool:
    """JSON writes whole numbers of floats without a point, and truth is no number."""
    if kind is Mapping:
        return isinstance(value, dict)
    return type(value) is kind or (kind is float and type(value) is int)
