"""Sizes that only a run will tell, one set for each unit.

With expert parallelism every layer learns at run time how many tokens it gets. The trace writes
each such number as a symbol; a stamped layer needs symbols of its own, of which the shape
environment knows the same as of the traced ones: ranges, and what was checked of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from gt_trace._torch_internals import ShapeEnv, forget_conclusions
from gt_trace.stamping.known_sizes import Renaming
from gt_trace.stamping.long_sums import LongSums
from gt_trace.stamping.report import NotStampable


def symbols_bound_by(nodes: Sequence[Node]) -> list[Any]:
    """The symbols that come into being in ``nodes``, in order."""
    return [symbol for node in nodes for symbol in node.meta.get("unbacked_bindings", {})]


class UnitSymbols:
    """The symbols that the first interior unit binds, and their counterparts in others.

    Raises:
        NotStampable: the environment knows other things of ``theirs`` than of ``ours``.
    """

    def __init__(
        self, shape_env: ShapeEnv | None, ours: Sequence[Any], theirs: Sequence[Any]
    ) -> None:
        if len(ours) != len(theirs):
            raise NotStampable(
                f"the interior layers bind {len(ours)} and {len(theirs)} sizes at run time"
            )
        self._shape_env = shape_env
        self._ours = tuple(ours)
        self._own = frozenset(ours)
        self._to_last = dict(zip(ours, theirs, strict=True))
        self._sizes: dict[Any, torch.SymInt] = {}
        self._renamings: dict[Any, Renaming] = {}  # by a unit's first symbol
        self._is_own: dict[Any, bool] = {}
        self._long_sums = LongSums(shape_env)
        self._known: _Known | None = None
        if ours:
            assert shape_env is not None
            self._require_equal_facts(shape_env)

    def same(self, ours: Any, theirs: Any) -> bool:
        """Whether a size of the first unit and one of the last are counterparts."""
        if isinstance(ours, int) and isinstance(theirs, int):
            return ours == theirs
        if isinstance(ours, int) or isinstance(theirs, int):
            return False
        return bool(ours.node.expr.xreplace(self._to_last) == theirs.node.expr)

    def fresh(self) -> dict[Any, Any]:
        """New symbols for another unit, by those of the first."""
        if not self._ours:
            return {}
        shape_env: Any = self._shape_env
        with shape_env.ignore_fresh_unbacked_symbols():
            made = {each: shape_env.create_unbacked_symint().node.expr for each in self._ours}
        if self._known is None:
            self._known = _Known.of(shape_env, self._own)
        renaming = self._renamings[made[self._ours[0]]] = Renaming(made)
        self._known.tell(shape_env, renaming)
        return made

    def size(self, size: Any, replaced: dict[Any, Any]) -> Any:
        """A size of the first unit, with its symbols replaced."""
        if isinstance(size, int) or not replaced:
            return size
        expression = size.node.expr
        is_own = self._is_own.get(expression)
        if is_own is None:
            is_own = bool(expression.free_symbols & self._own)
            self._is_own[expression] = is_own
        if not is_own:
            return size
        key = (expression, replaced[self._ours[0]])
        made = self._sizes.get(key)
        if made is None:
            shape_env: Any = self._shape_env
            short = self._renamings[key[1]](self._long_sums.shortened(expression, key[1]))
            made = self._sizes[key] = shape_env.create_symintnode(short, hint=None)
            self.derived(made, size, replaced)
        return made

    def derived(self, made: Any, size: Any, replaced: dict[Any, Any]) -> None:
        """``made`` came out of sizes of another unit as ``size`` did out of those of the first.

        It stands for the whole expression once ``settle`` is called.
        """
        if isinstance(made, int):
            return
        renaming = self._renamings[replaced[self._ours[0]]]
        self._long_sums.remember(made, renaming(size.node.expr))

    def settle(self) -> None:
        """Sizes that were made stand for their whole expressions from now on."""
        self._long_sums.settle()

    def _require_equal_facts(self, shape_env: Any) -> None:
        theirs = _facts(shape_env, {each: each for each in self._to_last.values()})
        if _facts(shape_env, self._to_last) != theirs:
            raise NotStampable("what is known of sizes at run time differs between the layers")


def _facts(shape_env: Any, names: dict[Any, Any]) -> list[Any]:
    """What the environment knows of the symbols ``names``, told of their counterparts."""
    own = frozenset(names)
    facts = [
        (counterpart, shape_env.var_to_range[symbol], symbol in shape_env.size_like)
        for symbol, counterpart in names.items()
    ]
    asserted = {
        assertion.expr.xreplace(names)
        for assertions in shape_env.deferred_runtime_asserts.values()
        for assertion in assertions
        if assertion.expr.free_symbols & own
    }
    divisible = {each.xreplace(names) for each in shape_env.divisible if each.free_symbols & own}
    replaced = {
        (symbol.xreplace(names), value.xreplace(names))
        for symbol, value in shape_env.replacements.items()
        if ({symbol} | value.free_symbols) & own
    }
    return [facts, asserted, divisible, replaced]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the environment knows of the symbols of one unit, found once for all others."""

    assertions: tuple[tuple[Any, Any], ...]
    axioms: tuple[tuple[Any, Any], ...]
    divisible: tuple[Any, ...]
    replacements: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(cls, shape_env: Any, own: frozenset[Any]) -> _Known:
        """All that speaks of the symbols ``own``."""
        return cls(
            assertions=tuple(
                (symbol, each)
                for symbol, assertions in shape_env.deferred_runtime_asserts.items()
                for each in assertions
                if each.expr.free_symbols & own
            ),
            axioms=tuple(
                (expression, truth)
                for expression, truth in shape_env.axioms.items()
                if expression.free_symbols & own
            ),
            divisible=tuple(each for each in shape_env.divisible if each.free_symbols & own),
            replacements=tuple(
                (symbol, value)
                for symbol, value in shape_env.replacements.items()
                if ({symbol} | value.free_symbols) & own
            ),
        )

    def tell(self, shape_env: Any, renaming: Renaming) -> None:
        """Let the environment know the same of new symbols, by those that they stand beside."""
        made = renaming.symbols
        for symbol, new in made.items():
            shape_env.var_to_range[new] = shape_env.var_to_range[symbol]
            if symbol in shape_env.size_like:
                shape_env.size_like.add(new)
        for symbol, assertion in self.assertions:
            told = replace(assertion, expr=renaming(assertion.expr))
            key = made.get(symbol, symbol)
            shape_env.deferred_runtime_asserts.setdefault(key, []).append(told)
            shape_env.num_deferred_runtime_asserts += 1
        for expression, truth in self.axioms:
            shape_env.axioms[renaming(expression)] = truth
        shape_env.divisible.update(map(renaming, self.divisible))
        for symbol, value in self.replacements:
            shape_env.replacements[made.get(symbol, symbol)] = renaming(value)
        # Forget what was concluded without them.
        forget_conclusions(shape_env)
