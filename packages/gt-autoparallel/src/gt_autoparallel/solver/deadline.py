"""When a search ends, apart from the search itself."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time by ``time.perf_counter``.

    A search hands it to its parts. With methods of its own they would hold the search, in a cycle
    that lives on while the garbage collector is held.
    """

    at: float

    def seconds_left(self) -> float:
        """Negative after it."""
        return self.at - time.perf_counter()

    def is_over(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.seconds_left() <= 0.0
