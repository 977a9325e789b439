"""Lets test modules import what they share, and gives them a process group of one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import settings

# An example's time is no property of ours, and a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def one_rank_group() -> Iterator[str]:
    """The name of a gloo group of one rank, over which collectives really run."""
    assert not dist.is_initialized(), "another test module left its process group behind"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()
