"""Every test of this folder runs on the CPU, whatever the machine has.

Holds the worker processes too: torchtitan is imported once for all of them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gt_trace.testing import GlooWorkers
from gt_trainer import device

device.install("cpu")

# A shell that runs pytest in the background lets it ignore Ctrl-C, and so would every program that a
# test starts and interrupts. A handler here becomes the default disposition there.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent))

_SEVERAL_RANKS = {"two", "four", "eight"}
_PRELOAD = ["gt_trainer.testing", "transformers.models.llama.modeling_llama"]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what keeps all cores busy, to be run one at a time."""
    for item in items:
        if not _SEVERAL_RANKS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def one() -> Iterator[GlooWorkers]:
    """One rank, in a process of its own, so that what torchtitan sets globally stays there."""
    with GlooWorkers(1, timeout=600, preload=_PRELOAD) as workers:
        yield workers


@pytest.fixture(scope="module")
def two() -> Iterator[GlooWorkers]:
    """Two ranks, no longer than a file needs them."""
    with GlooWorkers(2, timeout=600, preload=_PRELOAD) as workers:
        yield workers


@pytest.fixture(scope="session")
def four() -> Iterator[GlooWorkers]:
    """Four ranks."""
    with GlooWorkers(4, timeout=600, preload=_PRELOAD) as workers:
        yield workers


@pytest.fixture(scope="module")
def eight() -> Iterator[GlooWorkers]:
    """Eight ranks, for slow tests alone: no longer than a file needs them."""
    with GlooWorkers(8, timeout=900, preload=_PRELOAD) as workers:
        yield workers
