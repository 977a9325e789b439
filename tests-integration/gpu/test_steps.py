"""Training steps on a device: the same numbers, less memory, fewer launches."""

from __future__ import annotations

import pytest
from gpu import step_cases
from gpu.sites import Site

_POLICIES = ("save_all", "selective", "selective_alternate", "full_recompute", "offload")
_MEMORY_MARGIN = 0.10
"""How far the estimate may be from the allocator's count, either way, as a fraction of it."""


@pytest.mark.parametrize("policy", _POLICIES)
def test_eager_captured_and_replayed_training_are_the_same_to_the_bit(site: Site, policy) -> None:
    trained = step_cases.trained_three_ways(site, policy)
    assert trained.eager.differences(trained.captured) == []
    assert trained.captured.differences(trained.replayed) == []
    assert trained.num_pieces >= 1
    if policy == "offload":
        assert trained.num_offloaded > 0
        # Copies are recorded, all of them, or refused by name: never recorded by half.
        assert trained.num_pieces == 1 or trained.refused_copies
    else:
        assert trained.num_pieces == 1


@pytest.mark.parametrize("policy", _POLICIES)
def test_peak_memory_is_as_estimated(site: Site, policy) -> None:
    if policy == "offload" and not site.large:
        pytest.skip("host memory is the device's own on a CPU, so the two cannot be told apart")
    peak = step_cases.peak_memory(site, policy)
    assert abs(peak.error) <= _MEMORY_MARGIN, peak


def test_each_policy_takes_less_memory_than_the_one_before(gpu: Site) -> None:
    measured = {policy: step_cases.peak_memory(gpu, policy).measured_bytes for policy in _POLICIES}
    assert measured["selective"] < measured["save_all"], measured
    assert measured["offload"] < measured["selective"], measured
    assert measured["selective_alternate"] < measured["selective"], measured
    assert measured["full_recompute"] < measured["selective_alternate"], measured


def test_a_step_compiled_as_a_whole_is_recorded_in_one_piece(site: Site) -> None:
    """A region counts as the kernels in it, so that one region is no piece that is too small."""
    compiled = step_cases.compiled_and_recorded(site)
    assert compiled.num_pieces == 1
    assert compiled.largest_difference < (1e-4 if site.large else 1e-6)


def test_a_step_compiled_as_a_whole_is_one_launch(gpu: Site) -> None:
    """Besides it only results are copied out; the batch goes in by copies that are no kernels."""
    compiled = step_cases.compiled_and_recorded(gpu)
    graphs = compiled.launches.pop("cudaGraphLaunch", 0)
    assert graphs == 1, compiled
    assert compiled.launches.total() <= compiled.outputs_copied, compiled


def test_launches_are_counted_by_their_calls() -> None:
    assert step_cases.launches_of(lambda: None).total() == 0
    called = ["cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "aten::mm"]
    assert [step_cases._is_launch(name) for name in called] == [True, True, False, False]
