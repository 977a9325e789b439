"""Whole steps of a small mixture of experts, in chunks by either producer, scheduled: same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ep_overlap.scheduled_model_cases import outputs_before_and_after

from gt_trace.testing import GlooWorkers


@pytest.fixture(scope="module")
def workers() -> Iterator[GlooWorkers]:
    with GlooWorkers(2) as started:
        yield started


@pytest.mark.parametrize(
    ("strategy", "module_fqn", "memory_policy"),
    [
        ("eager", "layers.*.moe", "save_all"),
        ("eager", "layers.*", "full_recompute"),
        ("graph", "layers.*", "save_all"),
        ("graph", "layers.*.moe", "selective"),
        ("graph", "layers.*", "offload"),
    ],
)
def test_scheduling_keeps_every_bit_and_exposes_nothing(
    workers: GlooWorkers, strategy: str, module_fqn: str, memory_policy: str
):
    for rank in workers.run(outputs_before_and_after, strategy, module_fqn, memory_policy, False):
        assert all(map(torch.equal, rank["before"], rank["after"]))
        assert rank["exposed before"] > 0
        assert rank["exposed"] == []
        assert rank["counts"][0]["windows_interleaved"] > 0
        assert rank["counts"][1]["exchanges_moved"] >= 2 * 2 * 2 * 2
        assert not rank["changed again"]


@pytest.mark.parametrize(
    ("strategy", "module_fqn"), [("eager", "layers.*.moe"), ("graph", "layers.*")]
)
def test_no_bucket_stands_between_the_halves_of_an_exchange(
    workers: GlooWorkers, strategy: str, module_fqn: str
):
    for rank in workers.run(outputs_before_and_after, strategy, module_fqn, "selective", True):
        assert all(map(torch.equal, rank["before"], rank["after"]))
        assert rank["exposed"] == []
        assert rank["interrupted"] == ()
