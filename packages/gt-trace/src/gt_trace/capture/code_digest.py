"""Whether two functions have the same code, for programs that do not share memory.

A mask of FlexAttention is a function. What it closes over are tensors, and inputs of a graph; its
code is part of what a graph was made for, and a file holds no code, only what tells one from
another.
"""

from __future__ import annotations

import hashlib
from types import CodeType
from typing import Any


def code_digest(code: Any) -> str:
    """SHA-256 of a function without its values, and of those that it calls; 64 hex digits.

    Line numbers and file names do not count.

    Args:
        code: a function taken apart by ``gt_trace.capture.block_masks``.
    """
    digest = hashlib.sha256()
    for part in _parts(code):
        text = repr(part).encode()
        digest.update(f"{len(text)}:".encode() + text)
    return digest.hexdigest()


def _parts(code: Any) -> Any:
    yield "partial" if code.code is None else "function"
    if code.code is not None:
        yield from _of_code(code.code)
    yield str(code.values)
    for each in code.functions:
        yield each is None
        if each is not None:
            yield from _parts(each)


def _of_code(code: CodeType) -> Any:
    yield code.co_code
    yield (code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    yield (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield (type(constant).__name__, constant)
