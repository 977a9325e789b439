"""Rows of repeated layers as one: ``layers.0-31.attention.wq`` for thirty-two that are alike."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Content = TypeVar("Content", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangedRows(Generic[Content]):
    """Rows that differ in the number of their layer only."""

    name: str
    """The name that the rows share, with ranges in place of the numbers of layers."""

    count: int
    content: Content


def ranged_rows(rows: Iterable[tuple[str, Content]]) -> tuple[RangedRows[Content], ...]:
    """Rows with equal content and names alike, as one row each, in the order of the first.

    The first component of a name that is a number counts layers, as in ``layers.3.attention.wq``.
    """
    numbers: dict[tuple[str, str, Content], list[int]] = {}
    for name, content in rows:
        before, number, after = _split(name)
        numbers.setdefault((before, after, content), []).append(number)
    return tuple(
        RangedRows(name=_name(before, of_row, after), count=len(of_row), content=content)
        for (before, after, content), of_row in numbers.items()
    )


_NO_LAYER = -1
_LAYER = re.compile(r"(?:(.*?)\.)?(\d+)((?:[. /].*)?)")
"""What stands before the number of the layer, the number, and what stands behind it."""


def _split(name: str) -> tuple[str, int, str]:
    match = _LAYER.fullmatch(name)
    return (name, _NO_LAYER, "") if match is None else (match[1] or "", int(match[2]), match[3])


def _name(before: str, numbers: Sequence[int], after: str) -> str:
    if numbers[0] == _NO_LAYER:
        return before
    return ".".join(part for part in (before, _ranges(numbers)) if part) + after


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    return ",".join(
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    )
