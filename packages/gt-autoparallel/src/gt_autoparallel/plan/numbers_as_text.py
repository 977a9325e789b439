"""Times and sizes in the words of reports."""

from __future__ import annotations


def us_text(time_us: float) -> str:
    """A time in microseconds: ``1,234.5 us``."""
    return f"{time_us:,.1f} us"


def size_text(num_bytes: int) -> str:
    """A number of bytes: ``512 B``, ``2.25 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(3, (num_bytes.bit_length() - 1) // 10)
    unit = ("KiB", "MiB", "GiB")[power - 1]
    return f"{num_bytes / 1024**power:,.2f} {unit}"
