"""Compiled FlexAttention and async tensor parallelism against what they stand for."""

from __future__ import annotations

import pytest
import torch
from gpu import region_cases
from gpu.sites import Site

from gt_config import CompileConfig, MemoryPolicy
from gt_passes import DescribeOnly, PassContext, PassManager, default_passes

_TOLERANCE = 1e-2
"""TF32 in the kernel's products, relative to the largest element."""


def test_compiled_flex_attention_is_the_dense_one_in_both_directions(site: Site) -> None:
    results = region_cases.flex_attention_both_ways(site)
    assert results.num_regions == 2
    assert len(results.region) == len(results.dense) == 4
    assert region_cases.relative_difference(results.region, results.dense) < _TOLERANCE


def test_compiled_flex_attention_is_that_of_an_eager_model_to_the_bit(gpu: Site) -> None:
    results = region_cases.flex_attention_both_ways(gpu)
    assert list(map(torch.equal, results.region, results.compiled)) == [True] * 4


def test_fused_products_of_one_rank_are_the_plain_ones(site: Site) -> None:
    results = region_cases.async_tensor_parallel_on_one_rank(site)
    if site.large and results.refusals:
        pytest.skip(f"as far as it goes on this machine: {results.refusals}")
    assert results.counts == {"all_gathers_fused": 1, "reduce_scatters_fused": 1}
    torch.testing.assert_close(results.fused, results.plain)


@pytest.mark.parametrize("compilation", ["none", "regional", "full"])
@pytest.mark.parametrize("policy", ["save_all", "selective", "full_recompute", "offload"])
def test_attention_as_a_gpu_runs_it_passes_every_recipe(compilation, policy: MemoryPolicy) -> None:
    """Its operator returns lengths and a random state too: the verifier takes them as they are."""
    traced = region_cases.flash_attention_step(torch.device("cpu"))
    options = CompileConfig(inductor_compilation=compilation, memory_policy=policy)
    passes = default_passes(options, graph="STEP", compiler=DescribeOnly())
    report = PassManager(passes, context=PassContext.of_step(traced)).run(traced.graph_module)
    assert len(report.records) == len(passes)


def test_captured_attention_is_the_eager_one(site: Site) -> None:
    captured, eager = region_cases.scaled_dot_product_attention_captured(site)
    assert region_cases.relative_difference(captured, eager) <= (_TOLERANCE if site.large else 0)
