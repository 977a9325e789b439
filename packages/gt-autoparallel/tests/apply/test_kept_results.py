"""A second run is given what products and exchanges made in the first, and must be the same run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from gt_autoparallel.apply.placed_experts import KeptResults


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def num_exchanges(profile: torch.profiler.profile) -> int:
    """Those that reach the process group."""
    events = profile.key_averages()
    return sum(e.count for e in events if e.key.startswith("c10d::alltoall"))


def test_what_ranks_exchanged_is_exchanged_once_and_differentiated_all_the_same(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)

    def run() -> torch.Tensor:
        arrived = collectives.all_to_all_single_autograd(rows.tanh(), [6], [6], alone)
        back = collectives.all_to_all_single_autograd(torch.mm(arrived, weight), [6], [6], alone)
        return back.sin()

    expected = torch.autograd.grad(run().sum(), (rows, weight))
    kept = KeptResults(products=True)
    with torch.no_grad(), torch.profiler.profile() as profile:
        first = kept.keep(run)
    assert num_exchanges(profile) > 0
    with torch.profiler.profile() as profile:
        second = kept.give(run)
    assert num_exchanges(profile) == 0
    assert torch.equal(first, second)
    for gradient, wanted in zip(
        torch.autograd.grad(second.sum(), (rows, weight)), expected, strict=True
    ):
        assert torch.equal(gradient, wanted)


def test_how_many_rows_are_exchanged_is_found_out_once(alone: dist.ProcessGroup) -> None:
    counts, rows = torch.tensor([4]), torch.randn(4, 2)

    def run() -> torch.Tensor:
        (there,) = collectives.all_to_all_single(counts, None, None, alone).tolist()
        return collectives.all_to_all_single(rows, [there], [4], alone).sin()

    kept = KeptResults(products=False)
    with torch.profiler.profile() as profile:
        first = kept.keep(run)
    both = num_exchanges(profile)
    with torch.profiler.profile() as profile:
        second = kept.give(run)
    assert num_exchanges(profile) == both // 2 > 0
    assert torch.equal(first, second)


def test_a_second_run_that_differs_is_found() -> None:
    x = torch.randn(3, 3)
    kept = KeptResults(products=True)
    kept.keep(lambda: x @ x)
    with pytest.raises(AssertionError, match=r"the first run had no more aten\.mm"):
        kept.give(lambda: x @ x @ x)
    kept.keep(lambda: x @ x @ x)
    with pytest.raises(AssertionError, match="1 results of the first run were not asked for"):
        kept.give(lambda: x @ x)
