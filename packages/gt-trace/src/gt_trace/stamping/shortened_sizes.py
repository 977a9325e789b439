"""Tensors whose sizes are long sums, through one symbol for each sum while operators run on them.

What ``LongSums`` does for tensors while they are made, for what operators make of these. SymPy
judges each relation that an operator asks for, such as whether strides are contiguous, and of a sum
of 256 sizes that takes it a hundred times as long as of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gt_trace._torch_internals import (
    ShapeEnv,
    forget_conclusions,
    forget_replacement,
    set_expression,
    sympy_of_torch,
    value_range,
)
from gt_trace.capture.fake_tensors import tensors_in
from gt_trace.stamping.long_sums import LongSums

__all__ = ["ShortenedSizes"]


class ShortenedSizes:
    """The long sums of one shape environment that tensors have in short."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._shape_env: Any = shape_env
        self._sums = LongSums(shape_env)

    def shorten(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        """Let the sizes of a tensor be short until ``restore``, wherever they are.

        Args:
            tensor: with a dimension 0. That alone may be a long sum, beside what follows from it.
            is_new: whether a sum that is not in short yet shall be.
        """
        rows: Any = tensor.shape[0]
        if not isinstance(rows, torch.SymInt):
            return
        if is_new or rows.node.expr in self._sums.terms.values():
            for size in _symbolic_sizes(tensor):
                set_expression(size, self._sums.shortened(size.node.expr, None))

    def forget_values(self) -> bool:
        """Forget what the environment found short sizes to be; whether that was anything.

        It replaces a symbol by what it is equal to, as it would not replace the sum. Whoever hears
        so restores all sizes, and has what told it run again.
        """
        terms = self._sums.terms.keys()
        replacements = self._shape_env.replacements
        found = [
            symbol
            for symbol, value in replacements.items()
            if symbol in terms or not terms.isdisjoint(value.free_symbols)
        ]
        for symbol in found:
            forget_replacement(self._shape_env, symbol)
        return bool(found)

    def restore(self, values: Iterable[object]) -> None:
        """Make all sizes the whole sums again, and tell of these what was told of short ones.

        Args:
            values: trees of tensors and sizes, with all that came of shortened tensors.
        """
        terms = self._sums.terms
        if not terms:
            return
        known: dict[Any, Any] = {}
        for value in values:
            for size in _sizes_in(value):
                short = size.node.expr
                whole = known.get(short)
                if whole is None:
                    whole = known[short] = short.xreplace(terms)
                if whole is not short:
                    set_expression(size, whole)
        env = self._shape_env
        for symbol, sum_of_sizes in terms.items():
            for told in env.deferred_runtime_asserts.pop(symbol, []):
                whole_told = replace(told, expr=told.expr.xreplace(terms))
                env.deferred_runtime_asserts.setdefault(_last(sum_of_sizes), []).append(whole_told)
        self._sums.settle()
        forget_conclusions(env)

    def tell(self, tensor: torch.Tensor, number: int) -> None:
        """Tell of the rows of a tensor, if they are short, what is known of the sum already."""
        rows: Any = tensor.shape[0]
        if isinstance(rows, torch.SymInt) and rows.node.expr in self._sums.terms:
            known = sympy_of_torch().Integer(number)
            self._shape_env.var_to_range[rows.node.expr] = value_range(known, known)
            forget_conclusions(self._shape_env)


def _sizes_in(value: object) -> Iterator[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _sizes_in(each)
    else:
        for tensor in tensors_in(value):
            yield from _symbolic_sizes(tensor)


def _symbolic_sizes(tensor: torch.Tensor) -> Iterator[torch.SymInt]:
    """What a tensor says of its extent, in elements and in bytes."""
    if not tensor._has_symbolic_sizes_strides:
        return
    sizes: tuple[Any, ...] = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    for size in sizes:
        if isinstance(size, torch.SymInt):
            yield size
    asked: tuple[Callable[[], Any], ...] = (tensor.untyped_storage().nbytes, tensor.numel)
    for ask in asked:
        size = ask()
        if isinstance(size, torch.SymInt):
            yield size


def _last(sum_of_sizes: Any) -> Any:
    """The newest size of a sum, where PyTorch notes what is asserted of it."""
    unbacked = [symbol for symbol in sum_of_sizes.free_symbols if symbol.name.startswith("u")]
    return max(unbacked, key=lambda symbol: int(symbol.name[1:]))
