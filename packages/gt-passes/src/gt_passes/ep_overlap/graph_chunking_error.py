"""The error of chunking a graph."""

from __future__ import annotations

from collections.abc import Iterable

from gt_passes.errors import GtPassesError

__all__ = ["GraphChunkingError"]

_MAX_SHOWN = 10


class GraphChunkingError(GtPassesError, ValueError):
    """A graph cannot be run in chunks; every reason found is listed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        shown = list(self.problems[:_MAX_SHOWN])
        if len(self.problems) > _MAX_SHOWN:
            shown.append(
                f"and {len(self.problems) - _MAX_SHOWN} more, in GraphChunkingError.problems"
            )
        return "\n  - ".join(["the graph cannot be run in chunks:", *shown])
