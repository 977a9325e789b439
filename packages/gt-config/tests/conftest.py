"""What all tests of this package share, and lets them import it."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# An example's time is no property of ours, and a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

sys.path.insert(0, str(Path(__file__).parent))
