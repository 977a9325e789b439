"""Numbers for symbolic sizes, so that a graph with data-dependent shapes can be priced.

A size that a trace could not know (how many tokens the router sends to this rank) is an unbacked
symbol. Whoever prices a graph says what to assume for it. For expert parallelism the assumption is
balance: a rank receives as many tokens as it sends, in equal parts from all
(``balanced_exchange_sizes``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from gt_passes._torch_internals import traced_symbol_values, value_of
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.outlined_region import nodes_with_bodies


class _UnknownSizeError(Exception):
    """Something has neither a value nor a hint."""


class SymbolSizes:
    """Turns sizes into numbers: given values first, then what the trace saw.

    Args:
        sizes: values by symbol name (``{"u3": 3072}``).
        assumed: what a symbol counts as that has neither value nor hint. Such symbols are
            remembered in ``assumed_symbols``, so that a report can name them.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, *, assumed: int = 1) -> None:
        self._sizes = dict(sizes or {})
        self._assumed = assumed
        self._resolved: dict[int, tuple[Any, int]] = {}
        self._evaluated: dict[Any, int] = {}
        self._guessed: dict[Any, int] = {}
        self._assumed_symbols: dict[str, None] = {}

    @property
    def sizes(self) -> Mapping[str, int]:
        """The given values, by symbol name."""
        return self._sizes

    @property
    def assumed_symbols(self) -> tuple[str, ...]:
        """Symbols that were asked for and had neither value nor hint, in order of first use."""
        return tuple(self._assumed_symbols)

    def add(self, sizes: Mapping[str, int]) -> None:
        """Take values of further symbols, before anything asks for these."""
        self._sizes.update(sizes)

    def number(self, size: int | torch.SymInt) -> int:
        """The size as a number."""
        known = self.known_number(size)
        if known is not None:
            return known
        expression: Any = size.node.expr  # type: ignore[union-attr]  # a SymInt: not known
        if expression not in self._guessed:
            values = traced_symbol_values(size)  # type: ignore[arg-type]
            self._guessed[expression] = self._evaluate(expression, values, self._assumed)
        return self._guessed[expression]

    def known_number(self, size: int | torch.SymInt) -> int | None:
        """The size as a number; None if something would have to be assumed for it."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        # By the node, since asking it for its expression simplifies that anew. Kept, so that no
        # other node gets its address.
        resolved = self._resolved.get(id(size.node))
        if resolved is not None:
            return resolved[1]
        expression: Any = size.node.expr
        number = self._evaluated.get(expression)
        if number is None:
            try:
                number = self._evaluate(expression, traced_symbol_values(size), None)
            except _UnknownSizeError:
                return None
            self._evaluated[expression] = number
        self._resolved[id(size.node)] = (size.node, number)
        return number

    def _evaluate(self, expression: Any, traced: Mapping[Any, int], assumed: int | None) -> int:
        """As ``xreplace`` does, without an expression for each term of a long sum."""
        if expression.is_Symbol:
            return self._value(expression, traced, assumed)
        if expression.is_Integer:
            return int(expression)
        if expression.is_Add:
            return sum([self._evaluate(each, traced, assumed) for each in expression.args])
        if expression.is_Mul and all(each.is_Integer or each.is_Symbol for each in expression.args):
            return math.prod([self._evaluate(each, traced, assumed) for each in expression.args])
        symbols = expression.free_symbols
        values = {symbol: self._value(symbol, traced, assumed) for symbol in symbols}
        return int(expression.xreplace(values))

    def _value(self, symbol: Any, traced: Mapping[Any, int], assumed: int | None) -> int:
        name = symbol.name
        if name in self._sizes:
            return self._sizes[name]
        if symbol in traced:
            return int(traced[symbol])
        if assumed is None:
            raise _UnknownSizeError
        self._assumed_symbols[name] = None
        return assumed


def balanced_exchange_sizes(
    graph_module: GraphModule, *, sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Sizes of data-dependent symbols if every all-to-all gives a rank as much as it takes.

    Walks the all-to-alls in execution order. Where what goes in is known and what comes out is
    not, the rows that come in are shared out equally among the symbols of what comes out. With
    tokens spread evenly over experts, and experts over ranks, this is the expectation.

    Args:
        graph_module: a captured step.
        sizes: values that are known already; they are kept and returned too.

    Returns:
        Values by symbol name.
    """
    known = SymbolSizes(sizes)
    for node in nodes_with_bodies(graph_module):
        if not is_collective(node) or "all_to_all" not in str(node.target):
            continue
        given, taken = value_of(node.all_input_nodes[0]), value_of(node)
        if not (isinstance(given, torch.Tensor) and isinstance(taken, torch.Tensor)):
            continue
        if given.ndim == 0 or taken.ndim == 0:
            continue
        received = taken.shape[0]
        if known.known_number(received) is not None:
            continue
        rows = known.known_number(given.shape[0])
        if rows is None:
            continue
        expression: Any = received.node.expr  # type: ignore[attr-defined]  # a SymInt: not known
        symbols = sorted(symbol.name for symbol in expression.free_symbols)
        missing = [name for name in symbols if name not in known.sizes]
        rows -= sum(known.sizes.get(name, 0) for name in symbols)
        known.add(dict.fromkeys(missing, max(0, rows) // len(missing)))
    return dict(known.sizes)
