"""Captured training equals eager training, to the last bit, compared in the same run.

Eager is the same model, placed the same way, run without capture. Compared over five optimizer
steps: losses, every gradient before clipping, buffers, parameters; then batches whose documents,
expert loads and token counts the capture has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from capture.cases import compare_variants
from training_cases import (
    NUM_STEPS,
    NUM_UNSEEN_BATCHES,
    Case,
    Comparison,
    compare_modes,
    compare_resumed,
    histories,
    message_of_another_shape,
    recaptured,
)

from gt_trace.testing import GlooWorkers

FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
HSDP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
FSDP_TP_EP = {**FSDP_TP, "expert_parallel_degree": 2}
FSDP_EP = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}

LLAMA3 = Case(module="llama3", config="llama3_debugmodel")
QWEN3_TIED = Case(module="qwen3", config="qwen3_debugmodel")
QWEN3_MOE = Case(module="qwen3", config="qwen3_moe_debugmodel")
# The first of its layers is dense.
DEEPSEEK_V3 = Case(module="deepseek_v3", config="deepseek_v3_debugmodel", num_layers=3)


def on(case: Case, **changes: object) -> Case:
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return Case(**{**fields, **changes})


ONE_RANK = {
    "llama3": LLAMA3,
    "llama3, loss not chunked": on(LLAMA3, chunked_loss=False),
    "llama3, gradient accumulation": on(LLAMA3, gradient_accumulation_steps=2),
    "llama3, bfloat16": on(LLAMA3, param_dtype="bfloat16"),
    "qwen3, tied weights": QWEN3_TIED,
    "qwen3 with experts": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
}
FOUR_RANKS = {
    "llama3, FSDP 2 x TP 2": on(LLAMA3, parallelism=FSDP_TP),
    "llama3, FSDP 2 x TP 2, loss not chunked": on(LLAMA3, parallelism=FSDP_TP, chunked_loss=False),
    "llama3, FSDP 2 x TP 2, gradient accumulation": on(
        LLAMA3, parallelism=FSDP_TP, gradient_accumulation_steps=2
    ),
    "llama3, HSDP 2 x 2": on(LLAMA3, parallelism=HSDP),
    "llama3, HSDP 2 x 2, bfloat16": on(LLAMA3, parallelism=HSDP, param_dtype="bfloat16"),
    "qwen3, tied weights, FSDP 2 x TP 2": on(QWEN3_TIED, parallelism=FSDP_TP),
    # With more than two shards, gloo sums in an order that depends on the layout of the message, so
    # buckets round otherwise; test_recipe_numerics.py holds them to a bound.
    "deepseek_v3, FSDP 4 x EP 2": on(DEEPSEEK_V3, parallelism=FSDP_EP, fsdp_bucketing="off"),
    "deepseek_v3, FSDP 2 x TP 2 x EP 2": on(DEEPSEEK_V3, parallelism=FSDP_TP_EP),
    "deepseek_v3, FSDP 2 x TP 2 x EP 2, 2 layers": on(
        DEEPSEEK_V3, parallelism=FSDP_TP_EP, num_layers=2
    ),
}
# What the others hold too, each by itself; `make test-all` runs them.
LONG = {
    "llama3, loss not chunked",
    "llama3, bfloat16",
    "qwen3, tied weights",
    "llama3, FSDP 2 x TP 2",  # of five layers, stamped, in test_stamped_capture.py
    "llama3, FSDP 2 x TP 2, loss not chunked",
    "llama3, FSDP 2 x TP 2, gradient accumulation",
    "llama3, HSDP 2 x 2",
    "qwen3, tied weights, FSDP 2 x TP 2",
    "deepseek_v3, FSDP 4 x EP 2",
    "deepseek_v3, FSDP 2 x TP 2 x EP 2",
}
JOINT_ONE_RANK = (
    pytest.param("llama3, gradient accumulation", "min_cut", marks=pytest.mark.slow),
    pytest.param("llama3, bfloat16", "min_cut", marks=pytest.mark.slow),
    ("qwen3, tied weights", "min_cut"),
    pytest.param("deepseek_v3", "save_all", marks=pytest.mark.slow),
)
# Both ways to cut where the cut matters most, one elsewhere.
BOTH = ("min_cut", "save_all")
JOINT_FOUR_RANKS = (
    ("llama3, FSDP 2 x TP 2", BOTH[:1]),
    pytest.param("llama3, FSDP 2 x TP 2", BOTH, marks=pytest.mark.slow),
    pytest.param("llama3, FSDP 2 x TP 2, loss not chunked", BOTH[:1], marks=pytest.mark.slow),
    pytest.param("llama3, FSDP 2 x TP 2, gradient accumulation", BOTH[:1], marks=pytest.mark.slow),
    pytest.param("llama3, HSDP 2 x 2", BOTH[:1], marks=pytest.mark.slow),
    pytest.param("llama3, HSDP 2 x 2, bfloat16", BOTH[:1], marks=pytest.mark.slow),
    pytest.param("qwen3, tied weights, FSDP 2 x TP 2", BOTH[:1], marks=pytest.mark.slow),
    pytest.param("deepseek_v3, FSDP 4 x EP 2", BOTH[:1], marks=pytest.mark.slow),
    pytest.param("deepseek_v3, FSDP 2 x TP 2 x EP 2", BOTH[:1], marks=pytest.mark.slow),
)
FSDP_PASSES = {
    "bucket-all-gathers",
    "bucket-reduce-scatters",
    "prefetch-all-gathers",
    "delay-waits",
}
EXPERT_REGIONS = {
    ("forward", "dispatch", None),
    ("forward", "dispatch", "token_count_exchange"),
    ("forward", "dispatch", "token_exchange"),
    ("forward", "compute", None),
    ("forward", "combine", None),
    ("forward", "combine", "token_exchange"),
    ("backward", "dispatch", "token_exchange"),
    ("backward", "compute", None),
    ("backward", "combine", "token_exchange"),
}


# Those that come before layers with experts.
NUM_DENSE_LAYERS = {"qwen3_moe_debugmodel": 0, "deepseek_v3_debugmodel": 1}


def check(found: list[Comparison], case: Case) -> None:
    for rank, comparison in enumerate(found):
        assert comparison.differences == (), f"rank {rank}"
        num_passes = NUM_STEPS * case.gradient_accumulation_steps + NUM_UNSEEN_BATCHES
        assert len(comparison.losses) == num_passes
        # Also of the two that differ in documents only: the model attends within them.
        assert len(set(comparison.losses)) == num_passes
        assert comparison.without_gradient == ()
        assert comparison.num_tied_parameters == (case.config == "qwen3_debugmodel")
        num_dense = NUM_DENSE_LAYERS.get(case.config, case.num_layers)
        assert len(comparison.num_idle_experts) == case.num_layers - num_dense
        assert all(num_idle > 0 for num_idle in comparison.num_idle_experts)
        assert comparison.matmul_dtypes == {case.param_dtype}
        assert comparison.float8_dtypes == set()
        assert comparison.num_captures == 1
        assert comparison.verified


def but_for_long(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in names]


@pytest.mark.parametrize("name", but_for_long(ONE_RANK))
def test_captured_equals_eager_in_one_process(name: str, one: GlooWorkers, tmp_path: Path) -> None:
    check(one.run(compare_modes, ONE_RANK[name], str(tmp_path)), ONE_RANK[name])


@pytest.mark.parametrize("name", but_for_long(FOUR_RANKS))
def test_captured_equals_eager_on_four_ranks(name: str, four: GlooWorkers, tmp_path: Path) -> None:
    check(four.run(compare_modes, FOUR_RANKS[name], str(tmp_path)), FOUR_RANKS[name])


@pytest.mark.parametrize(("name", "partitioner"), JOINT_ONE_RANK)
def test_joint_graphs_equal_eager_in_one_process(
    name: str, partitioner: str, one: GlooWorkers, tmp_path: Path
) -> None:
    options = {"joint_partitioner": partitioner}
    found = one.run(compare_modes, ONE_RANK[name], str(tmp_path), "aot_joint", options)
    check(found, ONE_RANK[name])


@pytest.mark.parametrize(("name", "partitioners"), JOINT_FOUR_RANKS)
def test_joint_graphs_equal_eager_on_four_ranks(
    name: str, partitioners: tuple[str, ...], four: GlooWorkers, tmp_path: Path
) -> None:
    case = FOUR_RANKS[name]
    variants = {
        partitioner: {"mode": "aot_joint", "joint_partitioner": partitioner}
        for partitioner in partitioners
    }
    expected = FSDP_PASSES if case.fsdp_bucketing != "off" else set()
    for rank, found in enumerate(four.run(compare_variants, case, str(tmp_path), variants)):
        assert found.keys() == variants.keys()
        for partitioner, result in found.items():
            assert result.differences == (), f"rank {rank}, {partitioner}"
            num_passes = NUM_STEPS * case.gradient_accumulation_steps
            assert len(set(result.losses)) == num_passes + NUM_UNSEEN_BATCHES
            assert result.verified
            assert result.changed >= expected
            if "expert_parallel_degree" in case.parallelism:
                assert result.expert_regions >= EXPERT_REGIONS


# With experts, their biases are state that neither gradients nor the optimizer restore.
@pytest.mark.parametrize("name", [pytest.param("llama3", marks=pytest.mark.slow), "deepseek_v3"])
def test_resumed_run_equals_one_that_never_stopped(
    name: str, one: GlooWorkers, tmp_path: Path
) -> None:
    assert one.run(compare_resumed, ONE_RANK[name], str(tmp_path)) == [([], 2)]


@pytest.mark.slow
def test_resumed_run_equals_one_that_never_stopped_on_four_ranks(
    four: GlooWorkers, tmp_path: Path
) -> None:
    case = FOUR_RANKS["llama3, FSDP 2 x TP 2"]
    assert four.run(compare_resumed, case, str(tmp_path)) == [([], 2)] * 4


@pytest.mark.slow
def test_resumed_run_of_joint_graphs_equals_one_that_never_stopped(
    one: GlooWorkers, tmp_path: Path
) -> None:
    found = one.run(compare_resumed, ONE_RANK["llama3"], str(tmp_path), "aot_joint")
    assert found == [([], 2)]


@pytest.mark.parametrize(
    "mode", ["aot_fx_trace", pytest.param("aot_joint", marks=pytest.mark.slow)]
)
def test_changed_shape_is_captured_anew_where_that_is_configured(
    mode: str, one: GlooWorkers, tmp_path: Path
) -> None:
    case = on(LLAMA3, on_shape_change="recapture")
    assert one.run(recaptured, case, str(tmp_path), mode) == [([], 2)]


def test_changed_shape_is_an_error_that_names_input_and_both_shapes(
    one: GlooWorkers, tmp_path: Path
) -> None:
    (message,) = one.run(message_of_another_shape, LLAMA3, str(tmp_path))
    assert message == (
        "the inputs are not those of the captured step:\n"
        "  inputs: torch.int64 [2, 32], captured as torch.int64 [2, 64]\n"
        "  labels: torch.int64 [2, 32], captured as torch.int64 [2, 64]\n"
        "  extra_kwargs['positions']: torch.int64 [2, 32], captured as torch.int64 [2, 64]\n"
        "  extra_kwargs['attention_masks']: torch.bool [2, 1, 32, 32], captured as torch.bool "
        "[2, 1, 64, 64]"
    )


@pytest.mark.parametrize(
    "mode", ["aot_fx_trace", pytest.param("aot_joint", marks=pytest.mark.slow)]
)
def test_metrics_and_validation_files_are_those_of_eager(
    mode: str, one: GlooWorkers, tmp_path: Path
) -> None:
    (eager,) = one.run(histories, LLAMA3, "none", str(tmp_path / "eager"))
    (captured,) = one.run(histories, LLAMA3, mode, str(tmp_path / "captured"))
    assert captured == eager
    # torchtitan validates after the first step and after every second one.
    assert eager[1].count("\n") == 3
