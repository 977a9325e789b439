"""Models whose ranks share sequences: bits of eager training, numbers of whole sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from context_parallel.cases import (
    Distance,
    StoredRun,
    compare_documents,
    compare_options,
    compare_rings,
    compare_stored_graphs,
    compare_with_flex_attention,
    distance_to_whole_sequences,
    distances_of_rings_to_gathered_keys,
    losses_of_changed_tokens,
    losses_of_documents,
    reported,
    tokens_as_torchtitans,
)
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, Case, compare_modes, compare_resumed

from gt_trace.testing import GlooWorkers

BALANCERS = ("headtail", "ptrr", None)
_BLOCK = 128
"""Tokens that ptrr and FlexAttention's masks do not divide."""


def shared(ranks: int, config: str = "llama3_debugmodel", **case: Any) -> Case:
    """``ranks`` share each sequence; further degrees and the balancer may be given."""
    module = config.removesuffix("_debugmodel").removesuffix("_moe")
    names = {field.name for field in dataclasses.fields(Case)}
    settings = {name: value for name, value in case.items() if name in names}
    further = {name: value for name, value in case.items() if name not in names}
    return Case(
        module=module,
        config=config,
        parallelism={"context_parallel_degree": ranks, **further},
        **settings,
    )


FSDP_2 = {"data_parallel_shard_degree": 2}
TP_2 = {"tensor_parallel_degree": 2}
EP_2 = {"expert_parallel_degree": 2}
# Four shards: gloo sums buckets in another order than single gradients.
UNBUCKETED = {"fsdp_bucketing": "off"}


def slow(case: Case, name: str) -> Any:
    return pytest.param(case, id=name, marks=pytest.mark.slow)


ON_TWO = [
    slow(shared(2), "llama3"),
    slow(
        shared(2, context_parallel_load_balancer="ptrr", seq_len=2 * _BLOCK), "llama3, round robin"
    ),
    slow(shared(2, context_parallel_load_balancer=None), "llama3, tokens in order"),
    slow(shared(2, param_dtype="bfloat16"), "llama3, bfloat16"),
    slow(shared(2, gradient_accumulation_steps=2), "llama3, gradient accumulation"),
    slow(shared(2, "deepseek_v3_debugmodel", **EP_2), "deepseek_v3, EP 2"),
    slow(shared(2, "qwen3_debugmodel"), "qwen3"),
    slow(shared(2, "qwen3_moe_debugmodel", **EP_2), "qwen3_moe, EP 2"),
]
ON_FOUR = [
    pytest.param(shared(2, **TP_2), id="llama3, TP 2"),
    slow(shared(2, **FSDP_2, **UNBUCKETED), "llama3, FSDP 2"),
    slow(shared(2, data_parallel_replicate_degree=2), "llama3, replicas 2"),
    slow(shared(4, **UNBUCKETED), "llama3, on four"),
    slow(
        shared(4, context_parallel_load_balancer="ptrr", seq_len=4 * _BLOCK, **UNBUCKETED),
        "llama3, on four, round robin",
    ),
    slow(shared(2, "deepseek_v3_debugmodel", **EP_2, **TP_2), "deepseek_v3, TP 2 x EP 2"),
    slow(shared(2, "qwen3_debugmodel", **TP_2), "qwen3, TP 2"),
]


def check(found: list[Any], case: Case) -> None:
    num_passes = NUM_STEPS * case.gradient_accumulation_steps + NUM_UNSEEN_BATCHES
    for rank, comparison in enumerate(found):
        assert comparison.differences == (), f"rank {rank}"
        assert len(set(comparison.losses)) == num_passes
        assert comparison.without_gradient == ()
        assert comparison.num_captures == 1
        assert comparison.verified


@pytest.mark.parametrize("case", ON_TWO)
def test_captured_equals_eager_on_two_ranks(case: Case, two: GlooWorkers, tmp_path: Path) -> None:
    check(two.run(compare_modes, case, str(tmp_path)), case)


@pytest.mark.parametrize("case", ON_FOUR)
def test_captured_equals_eager_on_four_ranks(case: Case, four: GlooWorkers, tmp_path: Path) -> None:
    check(four.run(compare_modes, case, str(tmp_path)), case)


@pytest.mark.slow
@pytest.mark.parametrize("balancer", BALANCERS)
def test_captured_flex_attention_equals_torchtitans_own_context_parallelism(
    balancer: str | None, two: GlooWorkers, tmp_path: Path
) -> None:
    case = shared(2, context_parallel_load_balancer=balancer, seq_len=2 * _BLOCK)
    check(two.run(compare_with_flex_attention, case, str(tmp_path)), case)


@pytest.mark.slow
@pytest.mark.parametrize("balancer", BALANCERS)
def test_ranks_have_the_tokens_and_masks_that_torchtitan_gives_them(
    balancer: str | None, four: GlooWorkers
) -> None:
    assert four.run(tokens_as_torchtitans, balancer) == [[True] * 4] * 4


TO_WHOLE = [
    slow(shared(2, **FSDP_2), "llama3, FSDP 2"),
    slow(shared(2, **TP_2), "llama3, TP 2"),
    slow(shared(4), "llama3, on four"),
    slow(
        shared(4, context_parallel_load_balancer="ptrr", seq_len=4 * _BLOCK),
        "llama3, on four, round robin",
    ),
    slow(shared(2, "deepseek_v3_debugmodel", **FSDP_2, **EP_2), "deepseek_v3, FSDP 2 x EP 2"),
    slow(shared(4, "qwen3_debugmodel"), "qwen3, on four"),
    slow(shared(2, "qwen3_moe_debugmodel", **FSDP_2, **EP_2), "qwen3_moe, FSDP 2 x EP 2"),
]


@pytest.mark.parametrize("case", TO_WHOLE)
def test_numbers_are_those_of_whole_sequences(
    case: Case, four: GlooWorkers, tmp_path: Path
) -> None:
    for found in four.run(distance_to_whole_sequences, case, str(tmp_path)):
        _check_distance(found, 1e-6)


RINGS = [
    slow(shared(2, param_dtype="float32"), "llama3"),
    slow(shared(2, context_parallel_load_balancer=None), "llama3, tokens in order"),
    slow(shared(2, "deepseek_v3_debugmodel", **EP_2), "deepseek_v3, EP 2"),
    slow(shared(2, "qwen3_debugmodel"), "qwen3, fewer keys than queries"),
    slow(shared(2, "qwen3_moe_debugmodel", **EP_2), "qwen3_moe, EP 2"),
]


@pytest.mark.parametrize("case", RINGS)
def test_rings_have_the_bits_of_eager_rings_and_the_numbers_of_whole_sequences(
    case: Case, two: GlooWorkers, tmp_path: Path
) -> None:
    _check_rings(two.run(compare_rings, case, str(tmp_path), "dense"), case)


@pytest.mark.slow
@pytest.mark.parametrize("balancer", BALANCERS)
def test_so_do_rings_of_flex_attention(
    balancer: str | None, two: GlooWorkers, tmp_path: Path
) -> None:
    case = shared(2, context_parallel_load_balancer=balancer, seq_len=2 * _BLOCK)
    _check_rings(two.run(compare_rings, case, str(tmp_path), "flex"), case)


@pytest.mark.slow
def test_so_do_rings_of_four_tensor_parallel_ranks(four: GlooWorkers, tmp_path: Path) -> None:
    case = shared(2, **TP_2)
    _check_rings(four.run(compare_rings, case, str(tmp_path), "dense"), case)


@pytest.mark.slow
def test_rings_have_the_numbers_of_gathered_keys(four: GlooWorkers, tmp_path: Path) -> None:
    """To 1e-6, and what is left is rounding: it vanishes in float64."""
    case = shared(4)
    for single, double in four.run(distances_of_rings_to_gathered_keys, case, str(tmp_path)):
        _check_distance(single, 1e-6)
        _check_distance(double, 1e-13)
        assert max(single.gradients.values()) > 0


def _check_rings(found: list[Any], case: Case) -> None:
    check([comparison for comparison, _ in found], case)
    for _, distance in found:
        _check_distance(distance, 1e-6)


def _check_distance(distance: Distance, bound: float) -> None:
    assert distance.loss < bound
    furthest = max(distance.gradients, key=distance.gradients.__getitem__)
    assert distance.gradients[furthest] < bound, furthest


@pytest.mark.parametrize(
    ("balancer", "mode", "strategy"),
    [
        ("headtail", "aot_fx_trace", "gather"),
        ("headtail", "aot_fx_trace", "ring"),
        pytest.param("headtail", "none", "gather", marks=pytest.mark.slow),
        pytest.param(None, "aot_fx_trace", "gather", marks=pytest.mark.slow),
    ],
)
def test_nobody_attends_across_documents_or_into_the_future(
    balancer: str | None, mode: str, strategy: str, four: GlooWorkers, tmp_path: Path
) -> None:
    case = shared(4, context_parallel_load_balancer=balancer)
    options = {"context_parallel": strategy}
    for losses in four.run(losses_of_changed_tokens, case, mode, str(tmp_path), options):
        same = losses["nothing"]
        for what in ("the document before", "the document after", "later tokens"):
            assert losses[what] == same, what
        assert losses["earlier tokens"] != same


OPTIONS = {
    "selective": {"memory_policy": "selective"},
    "selective_alternate": {"memory_policy": "selective_alternate"},
    "full_recompute": {"memory_policy": "full_recompute"},
    "offload": {"memory_policy": "offload"},
    "joint": {"mode": "aot_joint"},
    "stamped": {"capture_layers": "stamped"},
    "second group": {"fsdp_second_group": True},
}


@pytest.mark.slow
def test_options_change_no_bit(two: GlooWorkers, tmp_path: Path) -> None:
    case = shared(2, num_layers=5)
    for rank, found in enumerate(two.run(compare_options, case, str(tmp_path), OPTIONS)):
        assert found.keys() == OPTIONS.keys()
        for name, result in found.items():
            assert result.differences == (), f"rank {rank}, {name}"
            assert result.verified
        assert found["stamped"].stamped


STRATEGIES = ("gather", "ring")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stored_graphs_have_the_bits_of_captured_ones(
    strategy: str, two: GlooWorkers, tmp_path: Path
) -> None:
    _check_stored(two.run(compare_stored_graphs, shared(2), str(tmp_path), strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stored_graphs_of_four_ranks_have_them_too(
    strategy: str, four: GlooWorkers, tmp_path: Path
) -> None:
    """Those of a ring name a rank's neighbours, which are no straight line of its place."""
    case = shared(4, **UNBUCKETED)
    _check_stored(four.run(compare_stored_graphs, case, str(tmp_path), strategy))


def _check_stored(found: list[tuple[StoredRun, StoredRun]]) -> None:
    for cold, warm in found:
        assert cold.differences == warm.differences == ()
        assert len(set(cold.losses)) == 2
        assert warm.is_loaded


@pytest.mark.slow
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_of_any_length_may_begin_anywhere(
    strategy: str, balancer: str | None, one: GlooWorkers, two: GlooWorkers, tmp_path: Path
) -> None:
    case = shared(2, context_parallel_load_balancer=balancer)
    whole = dataclasses.replace(case, parallelism={})
    (expected,) = one.run(losses_of_documents, whole, str(tmp_path / "whole"))
    assert len(set(expected.values())) == len(expected)
    for differences, losses in two.run(compare_documents, case, str(tmp_path), strategy):
        assert differences == ()
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_reported_losses_are_those_of_whole_sequences(
    one: GlooWorkers, two: GlooWorkers, tmp_path: Path
) -> None:
    """Ranks that share their samples have one mean over them; a validation has their masks too."""
    case = shared(2)
    whole = dataclasses.replace(case, parallelism={})
    found, _ = two.run(reported, case, str(tmp_path / "shared"))
    (expected,) = one.run(reported, whole, str(tmp_path / "whole"))
    assert len(found) == 4
    for (loss, largest), (loss_of_whole, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(loss_of_whole, rel=1e-5)
        assert largest is None or largest == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_resumed_run_equals_one_that_never_stopped(four: GlooWorkers, tmp_path: Path) -> None:
    case = shared(2, **FSDP_2, **UNBUCKETED)
    assert four.run(compare_resumed, case, str(tmp_path)) == [([], 2)] * 4
