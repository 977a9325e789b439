"""What a recording knows of sizes that only a run will tell, in words that all layers share.

A layer with experts has symbols of its own for the tokens that it gets. In its segment they have
names, in the order in which they come into it (``size0``, ``size1``, ...). Operators on such sizes
take PyTorch long, and give in each layer what they gave in the one before, told of the layer's own
symbols: if what is known of these is the same, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gt_trace._torch_internals import ShapeEnv

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

    def facts(self, sizes: SegmentSizes) -> Any:
        """All that is known of the symbols of a segment: ranges, assertions, replacements."""
        env = self._shape_env
        state = (env._version_counter, env.num_deferred_runtime_asserts, len(sizes.names))
        if sizes.facts is None or sizes.facts[0] != state:
            sizes.facts = (state, self._facts(sizes.names))
        return sizes.facts[1]

    def size(
        self, expression: Any, learned: tuple[tuple[Any, str], ...], sizes: SegmentSizes
    ) -> Any:
        """A size of a segment, like ``expression`` in another, where symbols had those names."""
        if isinstance(expression, int):
            return expression
        made = sizes.made.get((expression, learned))
        if made is None:
            own = {name: symbol for symbol, name in sizes.names.items()}
            told = expression.xreplace({symbol: own[name] for symbol, name in learned})
            made = self._shape_env.create_symintnode(told, hint=None)
            sizes.made[expression, learned] = made
        return made

    def _facts(self, names: Mapping[Any, str]) -> Any:
        env = self._shape_env
        first = min(map(_number, names), default=0)
        known = [
            (each.expr,)
            for symbol, assertions in env.deferred_runtime_asserts.items()
            if _number(symbol) >= first  # each is listed with the latest of its symbols
            for each in assertions
        ]
        known += [(each,) for each in env.divisible]
        known += env.replacements.items()
        ranges = tuple(
            (name, str(env.var_to_range[symbol]), symbol in env.size_like)
            for symbol, name in names.items()
        )
        return ranges, frozenset(
            tuple(_text(part, names) for part in fact)
            for fact in known
            if any(symbol in names for part in fact for symbol in part.free_symbols)
        )


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
    return _SYMBOL.fullmatch(str(symbol)) is not None


def _number(symbol: Any) -> int:
    """Symbols are numbered as they are made."""
    return int(str(symbol)[1:]) if _is_size(symbol) else 0
