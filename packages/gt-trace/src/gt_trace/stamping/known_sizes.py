"""What a recording knows of sizes that only a run will tell, in words that all layers share.

A layer with experts has symbols of its own for the tokens that it gets. In its segment they have
names, in the order in which they come into it (``size0``, ``size1``, ...). Operators on such sizes
take PyTorch long, and give in each layer what they gave in the one before, told of the layer's own
symbols: if what is known of these is the same, too.

An operator also records size constraints: an all-to-all checks that none of its sizes is negative.
SymPy takes longer to conclude what follows than the operator runs. ``ToldSizes`` stores what
followed for one layer, for replay with the symbols of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from gt_trace._torch_internals import ShapeEnv, forget_conclusions


class Renaming:
    """Symbols for others, each of them for one, of which SymPy knows the same (``integer``).

    ``xreplace`` makes every relation anew, and SymPy then tries to decide it, which takes
    milliseconds for sums of 64 sizes. What it could not decide once is not judged again here.

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


_SYMBOL = re.compile(r"[usz]\d+")


@dataclass(slots=True, kw_only=True)
class SegmentSizes:
    """The sizes of one segment that only a run will tell."""

    names: dict[Any, str] = field(default_factory=dict)
    """What symbols of SymPy are called here."""

    texts: dict[Any, str] = field(default_factory=dict)
    """Expressions of such symbols, with these names."""

    facts: tuple[Any, Any] | None = None
    """What is known of the symbols, and the state of the shape environment when it was found."""

    made: dict[tuple[Any, Any], torch.SymInt] = field(default_factory=dict)
    """Sizes made of expressions of another segment, by these and that segment's names."""

    renamings: dict[Any, Renaming] = field(default_factory=dict)
    """From symbols of other segments to those of this, by the names there."""

    def renaming(self, learned: tuple[tuple[Any, str], ...]) -> Renaming:
        """From symbols that had these names in another segment."""
        made = self.renamings.get(learned)
        if made is None:
            own = {name: symbol for symbol, name in self.names.items()}
            made = Renaming({symbol: own[name] for symbol, name in learned})
            self.renamings[learned] = made
        return made

    def text(self, size: Any) -> str:
        """A symbolic size in names of this segment.

        New symbols get names; those that come together in the order in which they were made.
        """
        expression = size.node.expr
        known = self.texts.get(expression)
        if known is None:
            new = expression.free_symbols - self.names.keys()
            for symbol in sorted(filter(_is_size, new), key=_number):
                self.names[symbol] = f"size{len(self.names)}"
            known = self.texts[expression] = _text(expression, self.names)
        return known


class KnownSizes:
    """What one recording's shape environment knows."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._shape_env: Any = shape_env
        self._made: list[Any] = []
        self._positions: dict[Any, int] = {}
        self._symbols_of: dict[Any, frozenset[Any]] = {}

    def facts(self, sizes: SegmentSizes) -> Any:
        """All that is known of the symbols of a segment: ranges, assertions, replacements."""
        env = self._shape_env
        state = (env._version_counter, env.num_deferred_runtime_asserts, len(sizes.names))
        if sizes.facts is None or sizes.facts[0] != state:
            sizes.facts = (state, self._facts(sizes))
        return sizes.facts[1]

    def size(
        self, expression: Any, learned: tuple[tuple[Any, str], ...], sizes: SegmentSizes
    ) -> Any:
        """A size of a segment, like ``expression`` in another, where symbols had those names."""
        if isinstance(expression, int):
            return expression
        made = sizes.made.get((expression, learned))
        if made is None:
            told = sizes.renaming(learned)(expression)
            made = self._shape_env.create_symintnode(told, hint=None)
            sizes.made[expression, learned] = made
        return made

    def before(self) -> KnownBefore:
        """What is known now, before an operator runs."""
        return KnownBefore(self._shape_env)

    def tell(
        self, told: ToldSizes, learned: tuple[tuple[Any, str], ...], sizes: SegmentSizes
    ) -> None:
        """Tell of a segment's symbols what was told in another, where they had those names."""
        told.tell(self._shape_env, sizes.renaming(learned), self._last)

    def _last(self, expression: Any) -> Any:
        """The symbol of an expression that was made last."""
        return max(filter(_is_size, self._symbols(expression)), key=_number)

    def _facts(self, sizes: SegmentSizes) -> Any:
        env, names = self._shape_env, sizes.names
        for symbol in islice(env.var_to_range, len(self._made), None):
            self._positions[symbol] = len(self._made)
            self._made.append(symbol)
        first = min((self._positions[symbol] for symbol in names), default=len(self._made))
        # What is asserted is listed with the symbol that was made last.
        known = [
            (each.expr,)
            for symbol in self._made[first:]
            for each in env.deferred_runtime_asserts.get(symbol, ())
        ]
        known += [(each,) for each in env.divisible]
        known += env.replacements.items()
        ranges: list[Any] = []
        for symbol, name in names.items():
            bounds = env.var_to_range[symbol]
            ranges.append((name, bounds.lower, bounds.upper, symbol in env.size_like))
        return tuple(ranges), frozenset(
            tuple(self._fact_text(part, sizes) for part in fact)
            for fact in known
            if any(not names.keys().isdisjoint(self._symbols(part)) for part in fact)
        )

    def _fact_text(self, expression: Any, sizes: SegmentSizes) -> str:
        """The text of an expression of which some symbols may have no name yet."""
        known = sizes.texts.get(expression)
        if known is None:
            known = _text(expression, sizes.names)
            if self._symbols(expression) <= sizes.names.keys():
                sizes.texts[expression] = known
        return known

    def _symbols(self, expression: Any) -> frozenset[Any]:
        found = self._symbols_of.get(expression)
        if found is None:
            found = self._symbols_of[expression] = frozenset(expression.free_symbols)
        return found


def expression_of(size: int | torch.SymInt) -> Any:
    """A number, or the expression of a symbolic size."""
    return size if isinstance(size, int) else size.node.expr


def _text(expression: Any, names: Mapping[Any, str]) -> str:
    """An expression with other names, in an order that those give.

    SymPy's own order is that of texts, in which ``u10`` comes before ``u9``.
    """
    if not expression.args:
        return names.get(expression) or str(expression)
    parts = [_text(each, names) for each in expression.args]
    if expression.is_Add or expression.is_Mul:
        parts.sort()
    return f"{type(expression).__name__}({', '.join(parts)})"


def _is_size(symbol: Any) -> bool:
    return _SYMBOL.fullmatch(symbol.name) is not None


def _number(symbol: Any) -> int:
    """Symbols are numbered as they are made."""
    return int(symbol.name[1:])
