"""Every test of this folder runs on the CPU, whatever the machine has.

Holds the worker processes too: torchtitan is imported once for all of them.
"""

from __future__ import annotations

import itertools
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test` divides tests by this one, and leaves `-m` to whoever calls it."""
    told = "only those marked `ranks`, to be run one at a time, or only the others"
    parser.addoption("--ranks", choices=("several", "one"), help=told)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what keeps all cores busy, and keeps what `--ranks` asks for."""
    by_ranks: dict[str, list[pytest.Item]] = {"several": [], "one": []}
    for item in items:
        if not _SEVERAL_RANKS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)
        by_ranks["several" if item.get_closest_marker("ranks") else "one"].append(item)
    wanted = config.getoption("--ranks")
    if wanted is not None:
        items[:] = by_ranks.pop(wanted)
        config.hook.pytest_deselected(items=[*itertools.chain(*by_ranks.values())])


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
