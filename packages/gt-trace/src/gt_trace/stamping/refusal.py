"""Why a capture cannot be stamped: an internal exception that becomes the reason in the report."""

from __future__ import annotations


class NotStampable(Exception):  # noqa: N818  # an outcome, which no caller sees as an error
    """Stamping was given up; the text says why, and the capture is made in full."""


class ReachesTooFar(NotStampable):
    """A value is used further away than the traced layers show; one more of each side may do."""
