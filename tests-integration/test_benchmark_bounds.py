"""The bound on what can be hidden, by hand on small numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gt_passes import ScheduleEpOverlap
from gt_passes.simulation import CostModel, h100_sxm, simulate_step

ROOT = Path(__file__).resolve().parent.parent

with pytest.MonkeyPatch.context() as paths:
    paths.syspath_prepend(ROOT / "packages/gt-passes/tests")
    paths.syspath_prepend(ROOT / "benchmarks")
    from chunk_overlap.exchange_bounds import exchange_bounds
    from ep_overlap.chunked_graphs import capture_step, exchanged, forward_region
    from pass_graphs import capture, run_pass

ROWS = 16384


TAKES_NOTHING = {"collective_sms": 0, "collective_sms_per_nic": 0, "collective_memory_passes": 0}


def bounds_of(graph_module, **hardware):
    # Replayed: else the host's launches hide a part of an exchange, too.
    cost_model = CostModel(
        replace(h100_sxm(), **hardware), ranks_of_group=lambda name: range(16), host="cuda_graph"
    )
    return exchange_bounds(graph_module, simulate_step(graph_module, cost_model))


def region(x, w):
    def of_chunk(part):
        return exchanged(part @ w, num_ranks=16) @ w

    return forward_region(x, 2, of_chunk=of_chunk)


@pytest.mark.parametrize("width", [512, 16384])
def test_the_bound_is_the_smaller_of_exchange_and_the_other_chunk(width):
    options = {"dtype": torch.bfloat16, "device": "meta"}
    graph_module = capture(
        region, torch.ones(2 * ROWS, width, **options), torch.ones(width, width, **options)
    )
    (before,) = bounds_of(graph_module)
    run_pass(ScheduleEpOverlap(), graph_module)
    (after,) = bounds_of(graph_module)
    assert before.exposed_us == pytest.approx(before.exchange_us, rel=0.02)
    assert after.hideable_us == pytest.approx(before.hideable_us)
    # Wide rows are computed for longer than they are sent, narrow ones not.
    is_all_hideable = after.hideable_us == pytest.approx(after.exchange_us)
    assert is_all_hideable == (width == 16384)
    # What an exchange slows computes for longer beside it, and so hides more of it.
    (alone,) = bounds_of(graph_module, **TAKES_NOTHING)
    assert after.exchange_us == pytest.approx(alone.exchange_us)
    if not is_all_hideable:
        assert after.hideable_us > 1.01 * alone.hideable_us
    assert after.exposed_us < before.exposed_us
    assert after.exposed_us >= after.least_exposed_us - 1e-6


def test_forward_and_backward_have_a_bound_each():
    forward, backward = bounds_of(capture_step(2))
    assert forward.exchange_us > 0
    assert backward.first_node != forward.first_node
