"""Whole recipes against eager training: bitwise where they promise it, within bounds elsewhere.

The recipe's defaults (buckets, prefetch) are what ``test_bitwise_equality.py`` runs; here is what a
user can ask for on top.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from capture.cases import Variant, VariantResult, compare_variants
from capture.test_bitwise_equality import FOUR_RANKS, FSDP_EP, LLAMA3, on
from training_cases import Case

from gt_trace.testing import GlooWorkers

SELECTIVE: Variant = {"memory_policy": "selective"}
FULL_RECOMPUTE: Variant = {"memory_policy": "full_recompute"}
BUT_FOR_PRODUCTS: Variant = {
    **FULL_RECOMPUTE,
    "full_recompute_saved_ops": ("layers.*.attention::aten.mm",),
}
OFFLOAD: Variant = {"memory_policy": "offload"}
SECOND_GROUP: Variant = {"fsdp_second_group": True}
DENSE_REGIONS: Variant = {"fsdp_into_dense_regions": True, "prefetch_layers": 2}
SMALL_BUCKETS: Variant = {"fsdp_bucket_cap_mib": 1}

ONE_BY_ONE = {
    "selective": SELECTIVE,
    "full recompute": FULL_RECOMPUTE,
    "full recompute but for products": BUT_FOR_PRODUCTS,
    "offload": OFFLOAD,
    "a second group": SECOND_GROUP,
    "dense regions": DENSE_REGIONS,
    "small buckets": SMALL_BUCKETS,
    "no overlap": {"prefetch_layers": 0},
}
# Every option in few runs, for each of which four ranks capture.
TOGETHER = {
    "selective, a second group": {**SELECTIVE, **SECOND_GROUP},
    "full recompute but for products, small buckets": {**BUT_FOR_PRODUCTS, **SMALL_BUCKETS},
    "offload, dense regions": {**OFFLOAD, **DENSE_REGIONS},
}
# One of each kind, for CI.
MIXED = {
    "full recompute but for products, a second group, dense regions": {
        **BUT_FOR_PRODUCTS,
        **SECOND_GROUP,
        **DENSE_REGIONS,
    }
}
# What depends on experts: what a policy recomputes of them, and launches around their regions.
TOGETHER_WITH_EXPERTS = {"full recompute, dense regions": {**FULL_RECOMPUTE, **DENSE_REGIONS}}
FLOAT32_ULP = 2.0**-23

WORKLOADS = (
    ("llama3, FSDP 2 x TP 2", MIXED),
    pytest.param("llama3, FSDP 2 x TP 2", TOGETHER, marks=pytest.mark.slow),
    pytest.param(
        "deepseek_v3, FSDP 2 x TP 2 x EP 2", TOGETHER_WITH_EXPERTS, marks=pytest.mark.slow
    ),
    pytest.param("deepseek_v3, FSDP 2 x TP 2 x EP 2", TOGETHER, marks=pytest.mark.slow),
    *(
        pytest.param(name, ONE_BY_ONE, marks=pytest.mark.slow)
        for name in (
            "llama3, FSDP 2 x TP 2",
            "llama3, HSDP 2 x 2",
            "deepseek_v3, FSDP 2 x TP 2 x EP 2",
        )
    ),
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


@pytest.mark.parametrize(("workload", "variants"), WORKLOADS)
def test_recipes_that_keep_numerics_equal_eager_bitwise(
    workload: str, variants: dict[str, Variant], four: GlooWorkers, tmp_path: Path
) -> None:
    for where, result in run(four, FOUR_RANKS[workload], tmp_path, variants):
        assert result.differences == (), where
        variant = variants[where.partition(", ")[2]]
        assert result.changed >= {"bucket-all-gathers", "bucket-reduce-scatters"}, where
        if "memory_policy" in variant:
            assert {"recompute-tagged", "reshard-after-forward"} <= result.changed, where
        for option, name in {
            ("memory_policy", "offload"): "offload-tagged",
            ("fsdp_second_group", True): "separate-reduction-group",
        }.items():
            assert (name in result.changed) == (option in variant.items()), where
        overlaps = variant.get("prefetch_layers") != 0
        assert ("prefetch-all-gathers" in result.changed) == overlaps, where


@pytest.mark.slow
def test_buckets_of_four_shards_round_otherwise_within_a_bound(
    four: GlooWorkers, tmp_path: Path
) -> None:
    """gloo's reduce-scatter sums the four addends of an element in an order that depends on where
    in the message the element stands; ``gt-trace/tests/fsdp/test_simple_fsdp_numerics.py`` shows it. Four
    addends are summed with at most three roundings, each of half an ulp of a partial sum."""
    case = on(FOUR_RANKS["deepseek_v3, FSDP 4 x EP 2"], fsdp_bucketing="transformer_block")
    assert case.parallelism == FSDP_EP
    for where, result in run(four, case, tmp_path, {"buckets": {}}):
        assert "bucket-reduce-scatters" in result.changed
        assert result.largest_first_difference <= 4 * FLOAT32_ULP, where


@pytest.mark.parametrize(
    ("name", "variant", "tolerance"),
    [
        pytest.param(
            "regional",
            {
                "inductor_compilation": "regional",
                "regional_modules": ("layers.*.feed_forward", "layers.*.attention_norm"),
            },
            1e-5,
            marks=pytest.mark.slow,
        ),
        ("full", {"inductor_compilation": "full"}, 1e-4),
        ("products side by side", {"numerics_changing": True}, 1e-5),
    ],
)
def test_what_may_round_otherwise_stays_within_its_tolerance(
    name: str, variant: Variant, tolerance: float, one: GlooWorkers, tmp_path: Path
) -> None:
    """Tolerances are those that the passes state, of the first step: the same weights."""
    # What compiling takes grows with the layers.
    case = on(LLAMA3, num_layers=1) if name == "full" else LLAMA3
    ((_, result),) = run(one, case, tmp_path, {name: variant})
    assert {"compile-regions", "compile-whole-graph", "fuse-parallel-matmuls"} & result.changed
    assert result.largest_first_difference <= tolerance


@pytest.mark.slow  # four C++ compilations of a whole step at once
def test_full_inductor_trains_on_four_ranks(four: GlooWorkers, tmp_path: Path) -> None:
    case = FOUR_RANKS["llama3, FSDP 2 x TP 2"]
    results = run(four, case, tmp_path, {"full": {"inductor_compilation": "full"}})
    for where, result in results:
        assert "compile-whole-graph" in result.changed
        assert result.largest_first_difference <= 1e-4, where
