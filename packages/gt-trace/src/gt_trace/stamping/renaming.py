"""Expressions of sizes with other symbols, without SymPy judging each relation again.

``xreplace`` makes every relation anew, and SymPy then tries to decide it from what it knows of the
symbols; of sums of 64 sizes that takes milliseconds. Where symbols change places with others of the
same kind, what it could not decide once it cannot decide now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Renaming"]


class Renaming:
    """Symbols for others, each of them for one, of which SymPy knows the same (``integer``).

    Args:
        symbols: new ones by old ones. No expression has a new symbol beside old ones already.
    """

    def __init__(self, symbols: Mapping[Any, Any]) -> None:
        self.symbols = symbols
        self._made: dict[Any, Any] = {}

    def __call__(self, expression: Any) -> Any:
        """``expression.xreplace(symbols)``."""
        if not expression.args:
            return self.symbols.get(expression, expression)
        made = self._made.get(expression)
        if made is None:
            made = self._made[expression] = self._renamed(expression)
        return made

    def _renamed(self, expression: Any) -> Any:
        parts = [self(each) for each in expression.args]
        if all(new is old for new, old in zip(parts, expression.args, strict=True)):
            return expression
        if expression.is_Relational:
            return expression.func(*parts, evaluate=False)
        return expression.func(*parts)
