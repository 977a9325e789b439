"""Ranks that would run other collectives say so, all of them, before anything hangs."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import collective_exchange_cases as cases
import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from pass_graphs import capture

from gt_passes.errors import CollectiveMismatchError
from gt_passes.second_groups import second_group_of
from gt_passes.verifier.collective_exchange import exchange_collective_digest
from gt_passes.verifier.collective_order import collective_digest
from gt_trace.testing import GlooWorkers, fake_world


@pytest.fixture(scope="module")
def workers() -> Iterator[GlooWorkers]:
    with GlooWorkers(4) as started:
        yield started


def test_ranks_that_agree_get_the_same_digest(workers: GlooWorkers):
    digests = workers.run(cases.agreed_digest)
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert re.fullmatch("[0-9a-f]{64}", digests[0])


def test_every_rank_raises_the_same_error_when_one_differs(workers: GlooWorkers):
    answers = workers.run(cases.error_when_some_differ, (2,))
    assert [ranks for _, ranks in answers] == [(2,)] * 4
    assert len({message for message, _ in answers}) == 1
    assert_expected_inline(
        re.sub("group '.*?'", "group '...'", answers[0][0]),
        """\
1 of 4 ranks would run other collectives than the rest, and all would hang: rank 2
collective 0 is not the same on every rank:
  rank 0 launches _c10d_functional.all_reduce over 4 ranks, 1 apart: input=float32[4], reduce_op='sum' (node all_reduce, group '...')
  rank 2 launches _c10d_functional.all_gather_into_tensor over 4 ranks, 1 apart: input=float32[4], group_size=4 (node all_gather_into_tensor, group '...')
Ranks must capture the same program: look for conditions on the rank, on its data or on its environment in the model, and for passes that iterate over sets.""",
    )


def test_the_few_are_named_not_the_many(workers: GlooWorkers):
    for differing, named in (((0,), (0,)), ((0, 1, 2), (3,)), ((2, 3), (2, 3))):
        answers = workers.run(cases.error_when_some_differ, differing)
        assert {ranks for _, ranks in answers} == {named}


def test_stages_of_a_pipeline_compare_among_themselves(workers: GlooWorkers):
    first, also_first, second, also_second = workers.run(cases.digests_of_two_stages)
    assert first == also_first
    assert second == also_second
    assert first != second


def test_a_rank_without_others_asks_nobody():
    graph_module = capture(lambda x: x.cos(), torch.ones(2))
    assert exchange_collective_digest(graph_module) == collective_digest(graph_module)
    with fake_world(rank=1, world_size=8):
        assert exchange_collective_digest(graph_module) == collective_digest(graph_module)


def test_the_error_survives_pickling():
    error = CollectiveMismatchError("ranks differ", ranks=[2])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks) == ("ranks differ", (2,))


def test_a_second_group_has_the_ranks_of_the_first(workers: GlooWorkers):
    answers = workers.run(cases.sums_over_second_groups)
    assert answers == [(True, True, True, total) for total in (2.0, 4.0, 2.0, 4.0)]


def test_second_groups_of_another_world_are_not_taken_for_those_of_this_one():
    """Names are used again: the first second group of either world has the same."""
    with fake_world(rank=0, world_size=2):
        second_group_of(dist.group.WORLD.group_name, purpose="exchanges")
    with fake_world(rank=0, world_size=2):
        name = dist.group.WORLD.group_name
        reductions = second_group_of(name, purpose="reductions")
        assert second_group_of(name, purpose="exchanges") != reductions
        assert second_group_of(name, purpose="reductions") == reductions


def test_there_is_no_second_group_of_none():
    with pytest.raises(ValueError, match=r"^'elsewhere' is not a process group of this process$"):
        second_group_of("elsewhere", purpose="reductions")
