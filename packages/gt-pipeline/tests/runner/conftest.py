"""Lets test modules import what they share, and holds the workers that all of them use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gt_trace.testing import GlooWorkers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def four() -> Iterator[GlooWorkers]:
    """Four ranks."""
    with GlooWorkers(4, timeout=300, preload=["gt_pipeline.runner"]) as workers:
        yield workers
