"""What all tests of this package share."""

from __future__ import annotations

from hypothesis import settings

# An example's time is no property of ours, and a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
