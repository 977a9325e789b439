"""Numbers for symbolic sizes, so that a graph with data-dependent shapes can be priced.

A size that a trace could not know (how many tokens the router sends to this rank) is an unbacked
symbol. Whoever prices a graph says what to assume for it. For expert parallelism the assumption is
balance: a rank receives as many tokens as it sends, in equal parts from all
(``balanced_exchange_sizes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from gt_passes._torch_internals import traced_symbol_values, value_of
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.outlined_region import nodes_with_bodies


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

    def knows(self, size: int | torch.SymInt) -> bool:
        """Whether nothing would have to be assumed for a size."""
        if not isinstance(size, torch.SymInt):
            return True
        traced = traced_symbol_values(size)
        return all(
            symbol in traced or str(symbol) in self._sizes for symbol in size.node.expr.free_symbols
        )

    def number(self, size: int | torch.SymInt) -> int:
        """The size as a number."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        # By the node, since asking it for its expression simplifies that anew. Kept, so that no
        # other node gets its address.
        known = self._resolved.get(id(size.node))
        if known is None:
            known = (size.node, self._evaluate(size))
            self._resolved[id(size.node)] = known
        return known[1]

    def _evaluate(self, size: torch.SymInt) -> int:
        expression: Any = size.node.expr
        if expression in self._evaluated:
            return self._evaluated[expression]
        traced, values = traced_symbol_values(size), {}
        for symbol in expression.free_symbols:
            name = str(symbol)
            if name in self._sizes:
                values[symbol] = self._sizes[name]
            elif symbol in traced:
                values[symbol] = traced[symbol]
            else:
                values[symbol] = self._assumed
                self._assumed_symbols[name] = None
        return self._evaluated.setdefault(expression, int(expression.xreplace(values)))


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
    found = dict(sizes or {})
    for node in nodes_with_bodies(graph_module):
        if not is_collective(node) or "all_to_all" not in str(node.target):
            continue
        given, taken = value_of(node.all_input_nodes[0]), value_of(node)
        if not (isinstance(given, torch.Tensor) and isinstance(taken, torch.Tensor)):
            continue
        if given.ndim == 0 or taken.ndim == 0:
            continue
        received = taken.shape[0]
        known = SymbolSizes(found)
        if known.knows(received) or not known.knows(given.shape[0]):
            continue
        expression: Any = received.node.expr  # type: ignore[attr-defined]  # a SymInt: not known
        symbols = sorted(map(str, expression.free_symbols))
        missing = [name for name in symbols if name not in found]
        rows = known.number(given.shape[0]) - sum(found.get(name, 0) for name in symbols)
        for name in missing:
            found[name] = max(0, rows) // len(missing)
    return found
