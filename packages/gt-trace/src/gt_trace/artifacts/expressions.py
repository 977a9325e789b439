"""Expressions of sizes as JSON: a symbol by its name, a number, or a function of others.

Sizes that only a run will tell are symbols (``u0``), and what depends on them are expressions of
sympy. Which functions there may be is a list; nothing is parsed or evaluated as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gt_trace._torch_internals import sympy_functions, sympy_of_torch
from gt_trace.artifacts.size_arithmetic import MAX_INTEGER
from gt_trace.errors import ArtifactError

_MAX_TERMS = 2_000
_MAX_TERMS_TOGETHER = 100_000
_MAX_DEGREE = 32
_MAX_EXPONENT = 16
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_NONE: Mapping[str, Any] = MappingProxyType({})


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


class SizeReader:
    """Makes expressions of the symbols of this process, none larger than can be computed with.

    Sympy computes powers and products of numbers when an expression is made, and PyTorch multiplies
    out and puts replacements in. So the extent of an expression is judged before it is made.

    Args:
        symbols: those of this process, by the names that the stored ones had.
        replacements: encoded expressions that equal a symbol, by its stored name.

    Raises:
        ArtifactError: A symbol is replaced by what contains it.
    """

    def __init__(
        self, symbols: Mapping[str, Any] = _NONE, replacements: Mapping[str, Any] = _NONE
    ) -> None:
        self.symbols = symbols
        self._replacements = replacements
        self._extents: dict[str, tuple[int, int] | None] = {}
        self._num_terms = 0

    def read(self, encoded: Any) -> Any:
        """Return the expression that was encoded.

        Raises:
            ArtifactError: A symbol or function is unknown, or the expression is too large.
        """
        self._num_terms += self._extent(encoded)[0]
        if self._num_terms > _MAX_TERMS_TOGETHER:
            raise ArtifactError(f"the sizes have more than {_MAX_TERMS_TOGETHER:,} terms together")
        return self._made(encoded)

    def _extent(self, encoded: Any) -> tuple[int, int]:
        """Return the number of terms when multiplied out, and the degree; numbers have one."""
        if isinstance(encoded, str):
            return self._extent_of_symbol(encoded)
        if type(encoded) is int and abs(encoded) > MAX_INTEGER:
            raise ArtifactError(f"a size has a number of {encoded.bit_length()} bits")
        if not isinstance(encoded, list) or not encoded:
            return 1, 1
        name, *arguments = encoded
        if len(arguments) > _MAX_TERMS:
            raise _too_large()
        extents = [self._extent(each) for each in arguments]
        terms, degree = sum(each for each, _ in extents), max((d for _, d in extents), default=1)
        if name == "Mul":
            terms, degree = math.prod(each for each, _ in extents), sum(d for _, d in extents)
        elif name in _POWERS:
            exponent = arguments[1] if len(arguments) == 2 else None
            if type(exponent) is not int or abs(exponent) > _MAX_EXPONENT:
                raise ArtifactError(
                    f"a size has the exponent {str(exponent)[:100]}, which is no integer from "
                    f"-{_MAX_EXPONENT} to {_MAX_EXPONENT}"
                )
            power = max(1, abs(exponent))
            terms, degree = extents[0][0] ** power, degree * power
        if terms > _MAX_TERMS or degree > _MAX_DEGREE:
            raise _too_large()
        return max(1, terms), degree

    def _extent_of_symbol(self, name: str) -> tuple[int, int]:
        if name not in self._replacements:
            return 1, 1
        if name not in self._extents:
            self._extents[name] = None  # while it is computed
            self._extents[name] = self._extent(self._replacements[name])
        found = self._extents[name]
        if found is None:
            raise ArtifactError(f"the size {name!r} is replaced by an expression of itself")
        return found

    def _made(self, encoded: Any) -> Any:
        sympy = sympy_of_torch()
        if isinstance(encoded, bool):
            return sympy.true if encoded else sympy.false
        if isinstance(encoded, int):
            return sympy.Integer(encoded)
        if isinstance(encoded, str):
            if encoded not in self.symbols:
                raise ArtifactError(
                    f"the size {encoded!r} is not among the symbols of the artifact"
                )
            return self.symbols[encoded]
        name, *arguments = encoded
        if name in _CONSTANTS and not arguments:
            return _CONSTANTS[name]()
        known: Mapping[str, Callable[..., Any]] = sympy_functions()
        if name not in known:
            raise ArtifactError(f"a size is a function {name!r}, which is not on the list")
        return known[name](*map(self._made, arguments))


def _too_large() -> ArtifactError:
    return ArtifactError(
        f"a size has more than {_MAX_TERMS:,} terms when it is multiplied out, or a degree above "
        f"{_MAX_DEGREE}"
    )


def _infinity(sign: int) -> Callable[[], Any]:
    def made() -> Any:
        from torch.utils._sympy.numbers import int_oo

        return int_oo * sign

    return made


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "IntInfinity": _infinity(1),
    "NegativeIntInfinity": _infinity(-1),
}
