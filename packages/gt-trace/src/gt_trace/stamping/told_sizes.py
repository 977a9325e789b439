"""What one operator tells PyTorch of sizes, to be told again of another layer's.

An all-to-all checks that none of the sizes it is given is negative, a product of two tensors that
they have equally many rows. PyTorch then knows that, and asks SymPy what follows, which takes
longer than the operator. What follows is the same in each layer, told of the layer's own symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from gt_trace._torch_internals import ShapeEnv, forget_conclusions
from gt_trace.stamping.renaming import Renaming


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldSizes:
    """Assertions, what follows from them, and narrower ranges, all of symbols that had names."""

    assertions: tuple[Any, ...]
    axioms: tuple[tuple[Any, Any], ...]
    ranges: tuple[tuple[Any, Any], ...]

    def tell(self, shape_env: ShapeEnv, renaming: Renaming, last: Callable[[Any], Any]) -> None:
        """Let an environment know the same of other symbols, by those that they stand beside.

        Args:
            shape_env: which knows of the other symbols what it, or another one, knew of these.
            renaming: to the other symbols.
            last: of the symbols in an expression the one that was made last.
        """
        env: Any = shape_env
        for symbol, bounds in self.ranges:
            env.var_to_range[renaming(symbol)] = bounds
        for assertion in self.assertions:
            told = replace(assertion, expr=renaming(assertion.expr))
            env.deferred_runtime_asserts.setdefault(last(told.expr), []).append(told)
        env.num_deferred_runtime_asserts += len(self.assertions)
        for expression, truth in self.axioms:
            env.axioms[renaming(expression)] = truth
        forget_conclusions(shape_env)


class KnownBefore:
    """What an environment knows before an operator runs."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._num_axioms = len(self._env.axioms)
        self._num_assertions = {
            symbol: len(listed) for symbol, listed in self._env.deferred_runtime_asserts.items()
        }
        self._ranges = dict(self._env.var_to_range)
        self._others = self._what_is_not_told_again()

    def told_since(self, names: Any) -> ToldSizes | None:
        """What it knows since then; None if that is more than can be told of other symbols.

        Args:
            names: the symbols of which it can be told.
        """
        env = self._env
        if (
            self._others != self._what_is_not_told_again()
            or self._ranges.keys() != env.var_to_range.keys()
        ):
            return None
        told = ToldSizes(
            assertions=tuple(
                assertion
                for symbol, listed in env.deferred_runtime_asserts.items()
                for assertion in listed[self._num_assertions.get(symbol, 0) :]
            ),
            axioms=tuple(islice(env.axioms.items(), self._num_axioms, None)),
            ranges=tuple(
                (symbol, bounds)
                for symbol, bounds in env.var_to_range.items()
                if bounds != self._ranges[symbol]
            ),
        )
        expressions = [each.expr for each in told.assertions]
        expressions += [expression for expression, _ in told.axioms]
        symbols = {symbol for each in expressions for symbol in each.free_symbols}
        symbols |= {symbol for symbol, _ in told.ranges}
        return told if symbols <= names.keys() else None

    def _what_is_not_told_again(self) -> tuple[Any, ...]:
        """New symbols, and sizes that turned out to be others or numbers: those change results."""
        env = self._env
        return (
            dict(env.replacements),
            set(env.divisible),
            set(env.size_like),
            dict(env.unbacked_renamings),
            len(env.guards),
        )
