"""Numbers that must not be smaller than a bound."""

from __future__ import annotations


def too_small(bound: int, **numbers: int | None) -> list[str]:
    """A sentence for each number, by its name, that is below ``bound``; None is no number."""
    return [
        f"{name} is {number}, must be at least {bound}"
        for name, number in numbers.items()
        if number is not None and number < bound
    ]
