"""How dry runs write times and bytes."""

from __future__ import annotations

GIB = 2**30


def ms(time_us: float) -> str:
    """A time in milliseconds."""
    return f"{time_us / 1000:,.1f} ms"
