"""Names that code mentions: what it may read of globals and attributes, without running it."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_LOADS_ATTRIBUTE = dis.opmap["LOAD_ATTR"]
_LOADS_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_ATTRIBUTES_HAVE_FLAG = sys.version_info >= (3, 12)
"""Whether the lowest bit of an argument says that the attribute is called."""

_NOT_OF_FORWARD = frozenset(
    {"__init__", "__setstate__", "extra_repr", "reset_parameters", "_load_from_state_dict"}
)


class MentionedNames(NamedTuple):
    """Names in code, and in the functions inside of it."""

    all: frozenset[str]
    """Names of globals, attributes and imports, and texts, which may be names for ``getattr``."""

    attributes: frozenset[str]
    """Attributes that are read and not called, and texts."""

    globals: frozenset[str]
    """Globals that are read, and texts."""


def names_in(code: types.CodeType) -> MentionedNames:
    """Return the names that code mentions."""
    texts: set[str] = set()
    names, attributes, read = set(code.co_names), set[str](), set[str]()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            names |= inner.all
            attributes |= inner.attributes
            read |= inner.globals
        for each in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(each, str):
                texts.add(each)
    for argument in _arguments(code.co_code, _LOADS_ATTRIBUTE):
        if not _ATTRIBUTES_HAVE_FLAG:
            attributes.add(code.co_names[argument])
        elif not argument & 1:
            attributes.add(code.co_names[argument >> 1])
    for argument in _arguments(code.co_code, _LOADS_GLOBAL):
        read.add(code.co_names[argument >> 1])
    return MentionedNames(
        frozenset(names | texts), frozenset(attributes | texts), frozenset(read | texts)
    )


def _arguments(code: bytes, operation: int) -> Iterator[int]:
    operations, arguments = code[::2], code[1::2]
    at = operations.find(operation)
    while at >= 0:
        argument, shift, before = arguments[at], 8, at - 1
        while before >= 0 and operations[before] == _EXTENDED:
            argument |= arguments[before] << shift
            shift, before = shift + 8, before - 1
        yield argument
        at = operations.find(operation, at + 1)


@functools.lru_cache(maxsize=4096)
def names_of_class(kind: Any) -> MentionedNames:
    """Return the names that the methods of one of PyTorch's classes mention in a forward."""
    nothing: frozenset[str] = frozenset()
    found = [MentionedNames(nothing, nothing, nothing)] + [
        names_in(inspect.unwrap(each).__code__)  # annotated methods are wrapped
        for name, each in vars(kind).items()
        if isinstance(each, types.FunctionType) and name not in _NOT_OF_FORWARD
    ]
    return MentionedNames(*(nothing.union(*each) for each in zip(*found, strict=True)))
