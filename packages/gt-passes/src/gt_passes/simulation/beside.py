"""What runs beside a collective runs slower: it lacks a part of the device.

NCCL's kernels keep multiprocessors to themselves while they run, and what they send and receive
passes through device memory. So a task that arithmetic bounds goes on with the multiprocessors that
are left, and one that memory bounds with the bandwidth that is left::

    compute  aaaaBBBBBBcccc      B takes 6 us in place of 4
    group        GGGGGG

Collectives keep their own time. Of several at once each part is the largest that one of them takes:
those on the same links share these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DeviceParts(NamedTuple):
    """Something for each of the two parts of a device that all of its streams share."""

    compute: float
    """Multiprocessors."""

    memory: float
    """Bandwidth of device memory."""


class _Taken(NamedTuple):
    stream: str
    start_us: float
    end_us: float
    parts: DeviceParts


class Neighbours:
    """Tasks that take parts of a device, for those that begin later in the order of issue.

    Tasks of one stream begin one after another, so that what is over for one is over for the next.
    """

    def __init__(self) -> None:
        self._taken: list[_Taken] = []
        self._beside: dict[str, tuple[list[_Taken], int]] = {}
        """By stream: what was not over when its last task began, and how many were known then."""

    def add(self, stream: str, start_us: float, end_us: float, parts: DeviceParts) -> None:
        """Tell of a task that takes ``parts``, as fractions."""
        if end_us > start_us and max(parts) > 0:
            self._taken.append(_Taken(stream, start_us, end_us, parts))

    def delay_us(self, stream: str, start_us: float, alone_us: float, needs: DeviceParts) -> float:
        """How much longer a task takes than alone.

        Args:
            stream: whose tasks have asked in the order in which they begin.
            start_us: when it begins.
            alone_us: what it takes alone.
            needs: microseconds of that for which it keeps each part busy, both at the same time.
        """
        beside, num_known = self._beside.get(stream, ([], 0))
        new = [taken for taken in self._taken[num_known:] if taken.stream != stream]
        beside = [taken for taken in (*beside, *new) if taken.end_us > start_us]
        self._beside[stream] = (beside, len(self._taken))
        if not beside or alone_us <= 0:
            return 0.0
        edges = sorted({edge for taken in beside for edge in (taken.start_us, taken.end_us)})
        now_us, left = start_us, 1.0
        for edge_us in edges:
            if edge_us <= now_us:
                continue
            running = [taken.parts for taken in beside if taken.start_us <= now_us < taken.end_us]
            whole_us = alone_us + more_us(needs, running)
            if now_us + left * whole_us <= edge_us:
                now_us, left = now_us + left * whole_us, 0.0
                break
            left -= (edge_us - now_us) / whole_us
            now_us = edge_us
        return max(0.0, now_us + left * alone_us - start_us - alone_us)


def more_us(needs: DeviceParts, running: Sequence[DeviceParts]) -> float:
    """By how much the longer of both parts grows where others take theirs all the time.

    Args:
        needs: microseconds for which a task keeps each part busy.
        running: fractions that each of the others takes.
    """
    if not running:
        return 0.0
    compute_us = needs.compute / (1 - max(parts.compute for parts in running))
    memory_us = needs.memory / (1 - max(parts.memory for parts in running))
    return max(compute_us, memory_us) - max(needs)
