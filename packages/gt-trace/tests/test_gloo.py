"""Collectives that overlap on one gloo group, of which PyTorch's own does not survive many."""

from __future__ import annotations

import gloo_cases as cases
import pytest

from gt_trace.gloo import use_one_gloo_thread
from gt_trace.testing import GlooWorkers

pytestmark = pytest.mark.skipif(
    not use_one_gloo_thread(), reason="this PyTorch has a built-in number of gloo threads"
)


def test_groups_have_one_thread_for_collectives_and_keep_their_ranks() -> None:
    with GlooWorkers(2) as workers:
        assert workers.run(cases.describe_groups) == [("gloo", [0, 1], 1), ("gloo", [0, 1], 1)]


@pytest.mark.slow
def test_collectives_that_overlap_do_not_end_the_process() -> None:
    with GlooWorkers(2, timeout=600) as workers:
        assert workers.run(cases.overlap, 20_000) == [2.0, 2.0]
