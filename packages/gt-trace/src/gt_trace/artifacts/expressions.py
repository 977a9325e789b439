"""Expressions of sizes as JSON: a symbol by its name, a number, or a function of others.

Sizes that only a run will tell are symbols (``u0``), and what depends on them are expressions of
sympy. Which functions there may be is a list; nothing is parsed or evaluated as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gt_trace._torch_internals import sympy_functions, sympy_of_torch
from gt_trace.errors import ArtifactError


def encoded_expression(expression: Any) -> Any:
    """An expression as JSON.

    Raises:
        ArtifactError: it has a function that is not on the list.
    """
    if isinstance(expression, bool | int):
        return expression
    if expression.is_Symbol:
        return expression.name
    name = type(expression).__name__
    if expression.is_Boolean and not expression.args:
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if name in _CONSTANTS:
        return [name]
    if name not in sympy_functions():
        raise ArtifactError(f"a size is {expression}, of which {name} cannot be stored")
    return [name, *map(encoded_expression, expression.args)]


def decoded_expression(encoded: Any, symbols: Mapping[str, Any]) -> Any:
    """The expression that was encoded.

    Args:
        encoded: as ``encoded_expression`` gives it.
        symbols: those of this process, by the names that the encoded ones had.

    Raises:
        ArtifactError: a symbol or function that there is not.
    """
    sympy = sympy_of_torch()
    if isinstance(encoded, bool):
        return sympy.true if encoded else sympy.false
    if isinstance(encoded, int):
        return sympy.Integer(encoded)
    if isinstance(encoded, str):
        if encoded not in symbols:
            raise ArtifactError(f"the size {encoded!r} is not among the symbols of the artifact")
        return symbols[encoded]
    name, *arguments = encoded
    if name in _CONSTANTS and not arguments:
        return _CONSTANTS[name]()
    known: Mapping[str, Callable[..., Any]] = sympy_functions()
    if name not in known:
        raise ArtifactError(f"a size is a function {name!r}, which is not on the list")
    return known[name](*(decoded_expression(each, symbols) for each in arguments))


def _infinity(sign: int) -> Callable[[], Any]:
    def made() -> Any:
        from torch.utils._sympy.numbers import int_oo

        return int_oo * sign

    return made


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "IntInfinity": _infinity(1),
    "NegativeIntInfinity": _infinity(-1),
}
