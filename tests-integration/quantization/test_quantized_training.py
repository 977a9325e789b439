"""Training in 8 bits, emulated: captured equals eager, to the last bit, and is in 8 bits at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from capture.cases import compare_variants
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, Case, compare_modes

from gt_trace.testing import GlooWorkers
from gt_trainer.quantization.quantization_options import (
    ExpertPrecision,
    LinearPrecision,
    QuantizationConfig,
)

pytest.importorskip(
    "torchao", reason="torchao is not installed; `make test` runs this folder with it"
)

FSDP = {"data_parallel_shard_degree": 4}
FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
FSDP_EP = {**FSDP, "expert_parallel_degree": 2}
SKIP = ("lm_head", "router.gate")
LINEARS: tuple[LinearPrecision, ...] = (
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "mxfp8",
)


def llama3(linears: LinearPrecision, parallelism: dict[str, int], **fields: object) -> Case:
    return Case(
        module="llama3",
        config="llama3_debugmodel",
        parallelism=parallelism,
        quantization=QuantizationConfig(linears=linears, skip=SKIP[:1], emulate=True),
        **fields,
    )


def deepseek_v3(
    linears: LinearPrecision, experts: ExpertPrecision, parallelism: dict[str, int]
) -> Case:
    return Case(
        module="deepseek_v3",
        config="deepseek_v3_debugmodel",
        parallelism=parallelism,
        quantization=QuantizationConfig(linears=linears, experts=experts, skip=SKIP, emulate=True),
        # With more than two shards, gloo sums buckets in an order that depends on their layout.
        fsdp_bucketing="off" if FSDP.items() <= parallelism.items() else "transformer_block",
    )


ONE_RANK = {f"llama3, {linears}": llama3(linears, {}) for linears in LINEARS}
FOUR_RANKS = {
    **{f"llama3, {each}, FSDP 2 x TP 2": llama3(each, FSDP_TP) for each in LINEARS},
    **{
        f"llama3, {each}, FSDP 4": llama3(each, FSDP, fsdp_bucketing="off")
        for each in LINEARS
        if each != "float8_rowwise_with_gw_hp"
    },
    "llama3, float8_rowwise, FSDP 2 x TP 2, bfloat16": llama3(
        "float8_rowwise", FSDP_TP, param_dtype="bfloat16"
    ),
    "deepseek_v3, float8, FSDP 2 x TP 2": deepseek_v3("float8_rowwise", "float8_rowwise", FSDP_TP),
    "deepseek_v3, float8, FSDP 4": deepseek_v3("float8_tensorwise", "float8_rowwise", FSDP),
    "deepseek_v3, float8, FSDP 4 x EP 2": deepseek_v3("float8_rowwise", "float8_rowwise", FSDP_EP),
    "deepseek_v3, MXFP8, FSDP 2 x TP 2": deepseek_v3("mxfp8", "mxfp8", FSDP_TP),
    "deepseek_v3, MXFP8, FSDP 4": deepseek_v3("mxfp8", "mxfp8", FSDP),
    "deepseek_v3, MXFP8, FSDP 4 x EP 2": deepseek_v3("mxfp8", "mxfp8", FSDP_EP),
}
# `make test-all` runs the others.
SHORT = {"llama3, float8_rowwise, FSDP 2 x TP 2"}


def but_for_short(names: dict[str, Case]) -> list[object]:
    return [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in names]


def check(case: Case, workers: GlooWorkers, folder: Path) -> None:
    for rank, found in enumerate(workers.run(compare_modes, case, str(folder))):
        assert found.differences == (), f"rank {rank}"
        assert len(set(found.losses)) == NUM_STEPS + NUM_UNSEEN_BATCHES
        assert found.without_gradient == ()
        assert found.verified
        # Tensor-wise scales are of activations and weights; their gradients have more range.
        is_tensorwise = case.quantization.linears == "float8_tensorwise"
        gradients = {"float8_e5m2"} if is_tensorwise else set()
        assert found.float8_dtypes >= {"float8_e4m3fn", *gradients}


@pytest.mark.parametrize("name", but_for_short(ONE_RANK))
def test_captured_equals_eager_in_one_process(name: str, one: GlooWorkers, tmp_path: Path) -> None:
    check(ONE_RANK[name], one, tmp_path)


@pytest.mark.slow
def test_every_way_to_capture_and_to_keep_activations_equals_eager(
    one: GlooWorkers, tmp_path: Path
) -> None:
    variants = {
        "joint": {"mode": "aot_joint"},
        "selective": {"memory_policy": "selective"},
        "full_recompute": {"memory_policy": "full_recompute"},
        "stamped": {"capture_layers": "stamped"},
        "stored": {"artifacts": str(tmp_path / "graphs")},
        "loaded": {"artifacts": str(tmp_path / "graphs")},
    }
    case = llama3("float8_rowwise", {}, num_layers=6)
    (found,) = one.run(compare_variants, case, str(tmp_path), variants)
    for name, result in found.items():
        assert result.differences == (), name
        assert len(set(result.losses)) == NUM_STEPS + NUM_UNSEEN_BATCHES
    assert found["stamped"].stamped


@pytest.mark.parametrize("name", but_for_short(FOUR_RANKS))
def test_captured_equals_eager_on_four_ranks(name: str, four: GlooWorkers, tmp_path: Path) -> None:
    check(FOUR_RANKS[name], four, tmp_path)
