"""Lets test modules import what they share, and holds the workers that all of them use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gt_trace.testing import GlooWorkers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def two() -> Iterator[GlooWorkers]:
    """Two ranks."""
    with GlooWorkers(2) as workers:
        yield workers
