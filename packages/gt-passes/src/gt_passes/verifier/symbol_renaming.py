"""Comparing recorded values that hold data-dependent sizes.

Running ``nonzero`` again gives a fresh size symbol: u7 where u0 is recorded. The two answers are
the same when one renaming of the fresh symbols makes them equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gt_passes.analysis.tensor_signature import signature


def equal_up_to_fresh_symbols(recorded: object, answer: object) -> bool:
    """Whether two values, or trees of them, agree when fresh symbols of the answer are renamed.

    A symbol of ``answer`` that does not occur in ``recorded`` may stand for one symbol of
    ``recorded``, the same everywhere, and no two for the same one.
    """
    recorded_leaves, answer_leaves = list(_leaves(recorded)), list(_leaves(answer))
    if len(recorded_leaves) != len(answer_leaves):
        return False
    recorded_symbols = {
        symbol for leaf in recorded_leaves for symbol in getattr(leaf, "free_symbols", ())
    }
    renaming: dict[Any, Any] = {}
    for old, new in zip(recorded_leaves, answer_leaves, strict=True):
        if _is_symbol(new) and _is_symbol(old) and new not in recorded_symbols:
            renaming.setdefault(new, old)
        renamed = new.xreplace(renaming) if hasattr(new, "xreplace") else new
        if not _equal(old, renamed):
            return False
    return len(set(renaming.values())) == len(renaming)


def _equal(first: Any, second: Any) -> bool:
    if first == second:
        return True
    # Expressions that multiply out to the same: 2*(s0 + 1) and 2*s0 + 2.
    if not (getattr(first, "free_symbols", None) and getattr(second, "free_symbols", None)):
        return False
    if getattr(first, "is_Boolean", False) or getattr(second, "is_Boolean", False):
        return False
    return bool((first - second).expand() == 0)


def _is_symbol(leaf: Any) -> bool:
    return bool(getattr(leaf, "is_symbol", False))


def _leaves(value: object) -> Iterator[Any]:
    """Sizes as numbers or expressions, everything else as signatures, in a fixed order."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield (len(value.shape), value.dtype, value.device)
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            yield _number(size)
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield value.node.expr
    else:
        yield signature(value)


def _number(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
