"""Lets test modules import what they share, and worker processes import test modules by name.

Holds the workers too: they serve every test module of the package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gt_trace.testing import GlooWorkers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def two() -> Iterator[GlooWorkers]:
    """Two ranks."""
    with GlooWorkers(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def four() -> Iterator[GlooWorkers]:
    """Four ranks."""
    with GlooWorkers(4) as workers:
        yield workers
