"""Reasons to stop a run that are complete in one sentence, and need no traceback."""

from __future__ import annotations


class RunStoppedError(Exception):
    """Ends the run with status 1; its text is all that is shown.

    It says what happened and what to do, and nothing in the program is wrong.
    """
