"""Whether two functions have the same code, for programs that do not share memory.

A mask of FlexAttention is a function. What it closes over are tensors, and inputs of a graph; its
code is part of what a graph was made for, and a file holds no code, only what tells one from
another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any


def code_digest(code: CodeType) -> str:
    """SHA-256 of what a function does; 64 hex digits. Nothing of where it is written counts."""
    return _digest(_of_code(code))


def function_digest(function: Any) -> str:
    """Likewise of a function without its values, and of those that it calls.

    Args:
        function: taken apart by ``gt_trace.capture.block_masks``.
    """
    return _digest(_parts(function))


def _digest(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = repr(part).encode()
        digest.update(f"{len(text)}:".encode() + text)
    return digest.hexdigest()


def _parts(function: Any) -> Iterator[object]:
    yield "partial" if function.code is None else "function"
    if function.code is not None:
        yield from _of_code(function.code)
    yield str(function.values)
    for each in function.functions:
        yield each is None
        if each is not None:
            yield from _parts(each)


def _of_code(code: CodeType) -> Iterator[object]:
    yield code.co_code
    yield (code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    yield (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):  # whose order is by chance
            yield sorted(map(repr, constant))
        else:
            yield (type(constant).__name__, constant)
