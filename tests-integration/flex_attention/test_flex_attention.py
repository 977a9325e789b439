"""Models that attend with torchtitan's own FlexAttention, as they do on GPUs, captured.

``flex_attention_cases.py`` says how that runs on a CPU, and what is not seen so.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from flex_attention.cases import (
    compare,
    compiled_operators,
    fake_capture,
    in_chunks,
    refusal_of_another_length,
    with_other_lengths,
    with_validation,
)
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, SEQ_LEN, Case

from gt_config import EpOverlapConfig
from gt_trace.testing import GlooWorkers

LLAMA3 = Case(module="llama3", config="llama3_debugmodel")
CASES = {
    "llama3": LLAMA3,
    "llama3, gradient accumulation": dataclasses.replace(LLAMA3, gradient_accumulation_steps=2),
    "llama3, bfloat16": dataclasses.replace(LLAMA3, param_dtype="bfloat16"),
    "qwen3": Case(module="qwen3", config="qwen3_debugmodel"),
    "qwen3 with experts": Case(module="qwen3", config="qwen3_moe_debugmodel"),
    "deepseek_v3": Case(module="deepseek_v3", config="deepseek_v3_debugmodel"),
}
POLICIES = ("save_all", "selective", "selective_alternate", "full_recompute", "offload")
QUICK = {("llama3, gradient accumulation", "save_all"), ("deepseek_v3", "full_recompute")}
"""Of the product of the two; the others are slow."""

EP_OVERLAP = EpOverlapConfig(enabled=True)
EAGER_CHUNKS = EpOverlapConfig(enabled=True, strategy="eager")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=() if (name, policy) in QUICK else pytest.mark.slow)
        for name in CASES
        for policy in POLICIES
    ],
)
def test_training_is_bitwise_eager(
    name: str, policy: str, one: GlooWorkers, tmp_path: Path
) -> None:
    case = CASES[name]
    (found,) = one.run(compare, case, str(tmp_path), {"memory_policy": policy})
    assert found.differences == ()
    # Five steps of packed text, then batches whose documents the capture has not seen.
    num_passes = NUM_STEPS * case.gradient_accumulation_steps + NUM_UNSEEN_BATCHES
    assert len(set(found.losses)) == num_passes
    assert found.num_captures == 1
    assert found.verified


@pytest.mark.slow
def test_sharded_training_is_bitwise_eager(four: GlooWorkers, tmp_path: Path) -> None:
    parallelism = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
    case = dataclasses.replace(LLAMA3, parallelism=parallelism)
    for found in four.run(compare, case, str(tmp_path)):
        assert found.differences == ()
        assert len(set(found.losses)) == NUM_STEPS + NUM_UNSEEN_BATCHES
        assert found.verified


@pytest.mark.slow
def test_chunks_of_either_producer_attend_within_their_documents(
    four: GlooWorkers, tmp_path: Path
) -> None:
    """They train with each other's bits, and as the whole model but for the order of sums."""
    parallelism = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}
    case = dataclasses.replace(CASES["deepseek_v3"], parallelism=parallelism)
    graph = dataclasses.replace(EP_OVERLAP, disable_early_grad_accumulation=True)
    for found in four.run(in_chunks, case, str(tmp_path), {"eager": EAGER_CHUNKS, "graph": graph}):
        assert found.differences == ()
        assert found.furthest < 1e-5, found.furthest_of
        assert found.chunk_sizes == {"graph": (1, 1)}
        assert found.verified


@pytest.mark.slow
def test_validation_has_masks_of_its_own(one: GlooWorkers, tmp_path: Path) -> None:
    ((eager, captured),) = one.run(with_validation, LLAMA3, str(tmp_path))
    assert captured == eager
    assert eager[1].count("\n") == 3


def test_another_length_is_an_error_that_names_the_mask(one: GlooWorkers, tmp_path: Path) -> None:
    (message,) = one.run(refusal_of_another_length, LLAMA3, str(tmp_path))
    half = SEQ_LEN // 2
    assert message == (
        "the arguments have another structure than the captured ones:\n"
        f"  extra_kwargs['attention_masks']: BlockMask with seq_lengths ({half}, {half}), captured "
        f"with ({SEQ_LEN}, {SEQ_LEN})"
    )


@pytest.mark.slow
def test_another_length_is_captured_again_if_asked_for(one: GlooWorkers, tmp_path: Path) -> None:
    case = dataclasses.replace(LLAMA3, on_shape_change="recapture")
    ((differences, num_captures),) = one.run(with_other_lengths, case, str(tmp_path))
    assert differences == []
    assert num_captures == 2


@pytest.mark.parametrize(
    ("model", "mesh", "options", "forward", "backward"),
    [
        ("llama3", "FSDP x TP", {"memory_policy": "selective"}, 2, 2),
        pytest.param("llama3", "FSDP", {}, 2, 2, marks=pytest.mark.slow),
        pytest.param(
            "llama3", "FSDP", {"memory_policy": "offload"}, 2, 2, marks=pytest.mark.slow
        ),
        # Each layer's is computed again; chunks have one each.
        ("deepseek_v3", "FSDP x EP", {"memory_policy": "full_recompute", "ep_overlap": EP_OVERLAP},
         8, 4),
        pytest.param(
            "deepseek_v3", "FSDP x EP", {"ep_overlap": EAGER_CHUNKS}, 4, 4, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_passes_take_flex_attention_on_meshes(
    model: str, mesh: str, options: dict[str, Any], forward: int, backward: int
) -> None:
    report = fake_capture(model, mesh, options)
    # Each is compiled, as it is when the model runs eagerly, and nothing else is.
    assert compiled_operators(report) == {
        "flex_attention": forward,
        "flex_attention_backward": backward,
    }
    assert report.passes[0].verified
    masks = [each.name for each in report.program.captured.inputs if "attention_masks" in each.name]
    assert masks[0] == "extra_kwargs['attention_masks'].kv_num_blocks"
    assert masks[-1] == "extra_kwargs['attention_masks']._closure_0"
