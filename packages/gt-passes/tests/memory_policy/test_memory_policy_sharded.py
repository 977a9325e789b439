"""Every memory policy on a step of FSDP times tensor parallelism, on four gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_policy_cases import Outcome, outcomes

from gt_trace.testing import GlooWorkers

POLICIES = ("save_all", "selective", "selective_alternate", "full_recompute", "offload")


@pytest.fixture(scope="module")
def by_rank() -> Iterator[list[dict[str, Outcome]]]:
    with GlooWorkers(4) as workers:
        yield workers.run(outcomes, POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_and_gradients_keep_every_bit_on_every_rank(by_rank, policy: str):
    assert [outcome[policy].is_bitwise for outcome in by_rank] == [True] * 4
    assert by_rank[0][policy].num_outputs == 1 + 1 + 2 * 7 + 2


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rank_runs_the_same_operators(by_rank, policy: str):
    assert len({outcome[policy].operators for outcome in by_rank}) == 1


def test_only_full_recompute_runs_collectives_again(by_rank):
    counts = {policy: by_rank[0][policy].collectives for policy in POLICIES}
    assert counts["selective"] == counts["offload"] == counts["save_all"]
    assert counts["selective_alternate"] == counts["save_all"]
    more = {
        name: counts["full_recompute"][name] - count
        for name, count in counts["save_all"].items()
        if counts["full_recompute"][name] != count
    }
    assert more == {"all_gather_into_tensor": 2}  # of the attention's output, in two layers


def test_policies_take_less_memory_the_more_they_let_go(by_rank):
    peaks = {policy: by_rank[0][policy].peak_bytes for policy in POLICIES}
    assert peaks["full_recompute"] < peaks["selective_alternate"] < peaks["selective"]
    assert peaks["selective"] < peaks["save_all"]
    assert peaks["offload"] < peaks["selective"]
