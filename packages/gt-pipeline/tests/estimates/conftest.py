"""Lets test modules import what they share, some of it with the tests of graphs and schedules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
sys.path.insert(0, str(Path(__file__).parents[1] / "schedules"))
