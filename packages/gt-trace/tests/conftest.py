"""Lets test modules import what they share, and worker processes import test modules by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
