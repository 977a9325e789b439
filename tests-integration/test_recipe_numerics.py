"""Whole recipes against eager training: bitwise where they promise it, within bounds elsewhere.

The recipe's defaults (buckets, prefetch) are what ``test_bitwise_equality.py`` runs; here is what a
user can ask for on top.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bitwise_equality import FOUR_RANKS, FSDP_EP, LLAMA3, on
from training_cases import Case
from variant_cases import Variant, VariantResult, compare_variants

from gt_trace.testing import GlooWorkers

MEMORY_POLICIES: dict[str, Variant] = {
    "selective": {"memory_policy": "selective"},
    "full recompute": {"memory_policy": "full_recompute"},
    "full recompute but for products": {
        "memory_policy": "full_recompute",
        "full_recompute_saved_ops": ("layers.*.attention::aten.mm",),
    },
    "offload": {"memory_policy": "offload"},
}
COMMUNICATION: dict[str, Variant] = {
    "a second group": {"fsdp_second_group": True},
    "dense regions": {"fsdp_into_dense_regions": True, "prefetch_layers": 2},
    "small buckets": {"fsdp_bucket_cap_mib": 1},
    "no overlap": {"prefetch_layers": 0},
}
BITWISE = {**MEMORY_POLICIES, **COMMUNICATION}
FLOAT32_ULP = 2.0**-23

WORKLOADS = (
    "llama3, FSDP 2 x TP 2",
    pytest.param("llama3, HSDP 2 x 2", marks=pytest.mark.slow),
    "deepseek_v3, FSDP 2 x TP 2 x EP 2",
)


def run(
    workers: GlooWorkers, case: Case, folder: Path, variants: dict[str, Variant]
) -> list[tuple[str, VariantResult]]:
    """What every rank found of every variant."""
    by_rank = workers.run(compare_variants, case, str(folder), variants)
    assert all(found.keys() == variants.keys() for found in by_rank)
    results = [
        (f"rank {n}, {name}", each) for n, f in enumerate(by_rank) for name, each in f.items()
    ]
    assert all(result.verified for _, result in results)
    # The unseen batches are unlike each other, so no run stands still.
    assert all(len(set(result.losses)) == len(result.losses) for _, result in results)
    return results


@pytest.mark.parametrize("workload", WORKLOADS)
def test_recipes_that_keep_numerics_equal_eager_bitwise(
    workload: str, four: GlooWorkers, tmp_path: Path
) -> None:
    results = run(four, FOUR_RANKS[workload], tmp_path, BITWISE)
    for where, result in results:
        assert result.differences == (), where
    changed = {where.partition(", ")[2]: result.changed for where, result in results}
    for name in MEMORY_POLICIES:
        assert {"recompute-tagged", "reshard-after-forward"} <= changed[name], name
    assert "offload-tagged" in changed["offload"]
    assert "separate-reduction-group" in changed["a second group"]
    assert not {"delay-waits", "prefetch-all-gathers"} & changed["no overlap"]
    for name in BITWISE:
        assert {"bucket-all-gathers", "bucket-reduce-scatters"} <= changed[name], name


def test_buckets_of_four_shards_round_otherwise_within_a_bound(
    four: GlooWorkers, tmp_path: Path
) -> None:
    """gloo's reduce-scatter sums the four addends of an element in an order that depends on where
    in the message the element stands; ``gt-trace/tests/test_simple_fsdp_numerics.py`` shows it. Four
    addends are summed with at most three roundings, each of half an ulp of a partial sum."""
    case = on(FOUR_RANKS["deepseek_v3, FSDP 4 x EP 2"], fsdp_bucketing="transformer_block")
    assert case.parallelism == FSDP_EP
    for where, result in run(four, case, tmp_path, {"buckets": {}}):
        assert "bucket-reduce-scatters" in result.changed
        assert result.largest_first_difference <= 4 * FLOAT32_ULP, where


@pytest.mark.parametrize(
    ("name", "variant", "tolerance"),
    [
        (
            "regional",
            {
                "inductor_compilation": "regional",
                "regional_modules": ("layers.*.feed_forward", "layers.*.attention_norm"),
            },
            1e-5,
        ),
        ("full", {"inductor_compilation": "full"}, 1e-4),
        ("products side by side", {"numerics_changing": True}, 1e-5),
    ],
)
def test_what_may_round_otherwise_stays_within_its_tolerance(
    name: str, variant: Variant, tolerance: float, one: GlooWorkers, tmp_path: Path
) -> None:
    """Tolerances are those that the passes state, of the first step: the same weights."""
    ((_, result),) = run(one, LLAMA3, tmp_path, {name: variant})
    assert {"compile-regions", "compile-whole-graph", "fuse-parallel-matmuls"} & result.changed
    assert result.largest_first_difference <= tolerance


@pytest.mark.slow  # four C++ compilations of a whole step at once
def test_full_inductor_trains_on_four_ranks(four: GlooWorkers, tmp_path: Path) -> None:
    case = FOUR_RANKS["llama3, FSDP 2 x TP 2"]
    results = run(four, case, tmp_path, {"full": {"inductor_compilation": "full"}})
    for where, result in results:
        assert "compile-whole-graph" in result.changed
        assert result.largest_first_difference <= 1e-4, where
