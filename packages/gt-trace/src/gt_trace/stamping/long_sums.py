"""Sizes that are long sums, through one symbol while tensors are made of them.

With expert parallelism a layer's tokens are a sum of as many sizes as there are ranks and experts.
PyTorch asks such a size for facts whenever a tensor is made: whether it may be negative, how many
bytes it comes to. Of a sum of 64 symbols each answer takes milliseconds, and is the same in every
layer. So a stamped layer's tensors are made with one symbol in place of each sum, and their sizes
told the whole expressions afterwards.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from gt_trace._torch_internals import (
    ShapeEnv,
    set_expression,
    stand_in_symbol,
    sympy_of_torch,
    value_range,
)

_LEAST_TERMS = 4


class LongSums:
    """Stand-ins for the long sums of one shape environment."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._shape_env: Any = shape_env
        self._stand_ins: dict[tuple[Any, Any], Any] = {}
        self._parts: dict[Any, tuple[Any, Any] | None] = {}  # factor and terms of a long sum
        self._sizes: list[tuple[torch.SymInt, Any]] = []

    @property
    def terms(self) -> dict[Any, Any]:
        """The sums, by the symbols that stand for them."""
        return {symbol: terms for (terms, _), symbol in self._stand_ins.items()}

    def shortened(self, expression: Any, unit: Any) -> Any:
        """An expression with one symbol for each long sum of sizes.

        Args:
            expression: of sizes of one layer.
            unit: the layer for which it is told; each has symbols of its own.
        """
        if not expression.args:
            return expression
        if expression.is_Add:
            if expression not in self._parts:
                is_long = self._is_long(expression)
                self._parts[expression] = expression.primitive() if is_long else None
            parts_of_sum = self._parts[expression]
            if parts_of_sum is not None:
                factor, terms = parts_of_sum
                return factor * self._stand_in(terms, unit)
        if expression.is_Add or expression.is_Mul:
            parts = [self.shortened(each, unit) for each in expression.args]
            if any(new is not old for new, old in zip(parts, expression.args, strict=True)):
                return expression.func(*parts)
        return expression

    def size(self, expression: Any) -> torch.SymInt:
        """A size that stands for ``expression`` once ``settle`` is called."""
        size: torch.SymInt = self._shape_env.create_symintnode(
            self.shortened(expression, None), hint=None
        )
        self.remember(size, expression)
        return size

    def remember(self, size: torch.SymInt, expression: Any) -> None:
        """``size`` is to stand for ``expression``."""
        self._sizes.append((size, expression))

    def settle(self) -> None:
        """Let every size stand for what it is to; the stand-ins are then in no tensor."""
        for size, expression in self._sizes:
            set_expression(size, expression)
        for symbol in self._stand_ins.values():
            assert symbol not in self._shape_env.deferred_runtime_asserts  # nothing was asked of it
            del self._shape_env.var_to_range[symbol]
        self._sizes.clear()
        self._stand_ins.clear()
        self._parts.clear()

    def _is_long(self, expression: Any) -> bool:
        """Whether a sum is one of many sizes, none of which can be negative."""
        ranges = self._shape_env.var_to_range
        return len(expression.args) >= _LEAST_TERMS and all(
            ranges[symbol].lower >= 0 for symbol in expression.free_symbols
        )

    def _stand_in(self, terms: Any, unit: Any) -> Any:
        known = self._stand_ins.get((terms, unit))
        if known is None:
            ranges = self._shape_env.var_to_range
            numbered = map(stand_in_symbol, itertools.count(len(self._stand_ins)))
            known = next(each for each in numbered if each not in ranges)  # others have theirs
            self._stand_ins[terms, unit] = known
            largest = sympy_of_torch().Integer(2**62)
            ranges[known] = value_range(0, largest)
        return known
