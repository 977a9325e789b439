"""Second groups: on NCCL with streams of high priority, elsewhere with the backend's own options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from gt_passes.second_groups import second_exchange_group, second_reduction_group

NUM_RANKS = 2
_made: list[Any] = []
"""Options of the groups of this module's backends, in the order in which they were made."""


def _create(common: Any, options: Any) -> FakeProcessGroup:
    _made.append(options)
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, None)


for backend in ("recording_nccl", "recording_other"):
    dist.Backend.register_backend(backend, _create, True, ["cpu", "cuda"])


@pytest.fixture
def made() -> Iterator[list[Any]]:
    _made.clear()
    yield _made
    dist.destroy_process_group()


def make_second_groups(backend: str, *, rank: int) -> None:
    """Make a reduction and an exchange group of the ranks of a world of that backend."""
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    _made.clear()
    name = dist.group.WORLD.group_name
    for second_group in (second_reduction_group, second_exchange_group, second_reduction_group):
        second_group(name)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="its options are part of a CUDA build")
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_groups_of_nccl_have_streams_of_high_priority(made: list[Any], rank: int) -> None:
    make_second_groups("recording_nccl", rank=rank)
    assert [options.is_high_priority_stream for options in made] == [True, True]
    # NCCL's backend writes the group's name and timeout into them.
    assert made[0] is not made[1]


def test_groups_of_another_backend_have_its_own_options(made: list[Any]) -> None:
    make_second_groups("recording_other", rank=0)
    assert made == [None, None]
