"""Every exception that gt-pipeline raises on purpose, in one tree.

::

    Exception
    └── GtPipelineError
        ├── ActionError             (ValueError)    what is no action of a pipeline schedule
        └── ScheduleError           (ValueError)    a schedule that does not exist or cannot run
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ActionError", "GtPipelineError", "ScheduleError"]


class GtPipelineError(Exception):
    """Base of every error that gt-pipeline raises on purpose."""


class ActionError(GtPipelineError, ValueError):
    """What is no action of a pipeline schedule; the message lists every reason."""

    def __init__(self, *, what: str, problems: Iterable[str]) -> None:
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(what, self.problems)

    def __str__(self) -> str:
        return "\n  - ".join([f"{self.what} is no action of a pipeline:", *self.problems])


class ScheduleError(GtPipelineError, ValueError):
    """A schedule that does not exist or cannot run; the message lists every reason."""

    def __init__(self, *, what: str, problems: Iterable[str]) -> None:
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(what, self.problems)

    def __str__(self) -> str:
        return "\n  - ".join([f"{self.what}:", *self.problems])
