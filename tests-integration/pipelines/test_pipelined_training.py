"""Captured pipelines of torchtitan's models compute the bits of the whole model, and of PyTorch.

Three runs of five optimizer steps, of two where it must be quick, from the same weights on 2 pipeline ranks x others: captured stages;
the whole model without a pipeline, its gradients summed over microbatches and then once over ranks;
PyTorch's own pipeline runtime over the same stages.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from pipelines.accumulated_cases import NUM_STEPS, compare_accumulated
from pipelines.cases import (
    FEW_BATCHES,
    Found,
    PipelineCase,
    compare_pipelines,
    compare_pipelines_of_flex_attention,
    trained_losses,
)
from pipelines.resume_cases import (
    resumed_state,
)
from training_cases import Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(
    module="llama3",
    config="llama3_debugmodel",
    num_layers=4,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2},
)
DEEPSEEK_V3 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    num_layers=4,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
)


def on(model: Case, schedule: str, **parallelism: int | bool) -> PipelineCase:
    return PipelineCase(
        model=dataclasses.replace(model, parallelism=parallelism), schedule=schedule
    )


def quick(case: PipelineCase) -> PipelineCase:
    return dataclasses.replace(case, num_batches=FEW_BATCHES)


TP = {"tensor_parallel_degree": 2}
FSDP = {"data_parallel_shard_degree": 2}
EP = {"expert_parallel_degree": 2}
CP = {"context_parallel_degree": 2}


def slow(case: PipelineCase, name: str) -> Any:
    return pytest.param(case, id=name, marks=pytest.mark.slow)


ON_FOUR = [
    slow(on(LLAMA3, "1F1B", **FSDP), "llama3, FSDP 2-1F1B"),
    slow(on(LLAMA3, "ZBVZeroBubble", **FSDP), "llama3, FSDP 2-ZBVZeroBubble"),
    slow(on(LLAMA3, "1F1B", data_parallel_replicate_degree=2), "llama3, replicas 2-1F1B"),
    slow(on(LLAMA3, "1F1B", **TP), "llama3, TP 2-1F1B"),
    slow(on(LLAMA3, "Interleaved1F1B", **TP), "llama3, TP 2-Interleaved1F1B"),
    slow(on(LLAMA3, "ZBVZeroBubble", **TP), "llama3, TP 2-ZBVZeroBubble"),
    pytest.param(quick(on(LLAMA3, "ZBVZeroBubble", **TP)), id="llama3, TP 2-ZBVZeroBubble, quick"),
    slow(
        on(LLAMA3, "1F1B", **TP, enable_sequence_parallel=False),
        "llama3, TP 2 of whole sequences-1F1B",
    ),
    slow(on(LLAMA3, "1F1B", **CP), "llama3, CP 2-1F1B"),
    slow(on(LLAMA3, "ZBVZeroBubble", **CP), "llama3, CP 2-ZBVZeroBubble"),
    slow(on(DEEPSEEK_V3, "1F1B", **FSDP, **EP), "deepseek_v3, EP 2-1F1B"),
    # The same in chunks is not slow: ``test_chunked_stages.py``.
    slow(on(DEEPSEEK_V3, "DualPipeV", **FSDP, **EP), "deepseek_v3, EP 2-DualPipeV"),
    slow(on(DEEPSEEK_V3, "DualPipeV", **TP, **EP), "deepseek_v3, TP 2 x EP 2-DualPipeV"),
]
ON_EIGHT = [
    *(
        slow(on(LLAMA3, schedule, **FSDP, **TP), f"llama3, FSDP 2 x TP 2-{schedule}")
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
    ),
    slow(on(LLAMA3, "1F1B", **FSDP, data_parallel_replicate_degree=2), "llama3, HSDP 2 x 2-1F1B"),
]


@pytest.mark.parametrize("case", ON_FOUR)
def test_losses_and_gradients_are_those_of_the_whole_model_and_of_pytorchs_runtime(
    case: PipelineCase, four: GlooWorkers, tmp_path: Path
):
    _check(case, four.run(compare_pipelines, case, str(tmp_path)))


@pytest.mark.parametrize("case", ON_EIGHT)
def test_so_are_those_of_eight_ranks(case: PipelineCase, eight: GlooWorkers, tmp_path: Path):
    _check(case, eight.run(compare_pipelines, case, str(tmp_path)))


def _check(case: PipelineCase, found: list[Found]) -> None:
    assert [each.differences for each in found] == [()] * len(found)
    assert all(each.num_gradients > 10 for each in found)
    assert {len(each.losses) for each in found} == {0, 2 * case.num_batches * case.num_microbatches}
    # Nothing is gathered that every rank has whole.
    sharding = {"data_parallel_shard_degree", "context_parallel_degree"}
    gathers = not sharding.isdisjoint(case.model.parallelism)
    # Tensor-parallel ranks have parts of what norms are given, however sequences lie.
    reduces = bool(case.model.parallelism)
    assert all(("UNSHARD" in each.actions) == gathers for each in found)
    assert [("REDUCE_GRAD" in each.actions) for each in found] == [reduces] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [on(LLAMA3, "1F1B", **FSDP), on(LLAMA3, "ZBVZeroBubble", **TP)],
    ids=["FSDP 2-1F1B", "TP 2-ZBVZeroBubble"],
)
def test_gradients_of_several_steps_of_the_schedule_add_up_before_an_update(
    case: PipelineCase, four: GlooWorkers, tmp_path: Path
):
    found = four.run(compare_accumulated, case, str(tmp_path))
    assert [differences for differences, _, _ in found] == [[]] * 4
    assert all(num_gradients > 5 for _, num_gradients, _ in found)
    assert {num_losses for _, _, num_losses in found} == {0, NUM_STEPS * case.num_microbatches}


@pytest.mark.slow
def test_accumulating_pipelines_train_as_eager_ones(four: GlooWorkers, tmp_path: Path):
    model = dataclasses.replace(LLAMA3, gradient_accumulation_steps=2)
    case = PipelineCase(model=model, schedule="1F1B")
    losses = {
        mode: four.run(trained_losses, case, mode, str(tmp_path / mode))[0]
        for mode in ("none", "aot_fx_trace")
    }
    assert len(losses["none"]) == 2
    # Eager stages reduce after each microbatch, captured ones once in each step of the schedule.
    assert losses["aot_fx_trace"] == pytest.approx(losses["none"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_eager_stages_of_tensor_parallelism_train_as_captured_ones(
    schedule: str, four: GlooWorkers, tmp_path: Path
):
    case = on(LLAMA3, schedule, **TP)
    eager = four.run(trained_losses, case, "none", str(tmp_path / "eager"))[0]
    captured = four.run(trained_losses, case, "aot_fx_trace", str(tmp_path / "captured"))[0]
    assert len(captured) == 2
    # Eager stages reduce after each microbatch, captured ones once.
    assert eager == pytest.approx(captured, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_torchtitans_own_attention_is_pipelined_likewise(
    microbatch_size: int, four: GlooWorkers, tmp_path: Path
):
    case = PipelineCase(
        model=LLAMA3,
        schedule="ZBVZeroBubble",
        microbatch_size=microbatch_size,
        options={"memory_policy": "selective"},
    )
    found = four.run(compare_pipelines_of_flex_attention, case, str(tmp_path))
    assert [each.differences for each in found] == [()] * 4
    assert {len(each.losses) for each in found} == {0, 2 * case.num_batches * case.num_microbatches}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FSDP, {"pipeline_parallel_degree": 1, **TP}),
        (TP, {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 4}),
        (TP, {"pipeline_parallel_degree": 4, "tensor_parallel_degree": 1}),
    ],
    ids=["FSDP to FSDP x TP", "TP to TP", "TP to more stages"],
)
def test_a_checkpoint_is_resumed_under_other_degrees(
    before: dict[str, int], after: dict[str, int], four: GlooWorkers, tmp_path: Path
):
    case = on(LLAMA3, "1F1B", **before)
    assert four.run(resumed_state, case, after, str(tmp_path)) == [()] * 4


@pytest.mark.slow
def test_a_checkpoint_of_three_parallelisms_is_resumed_by_other_degrees_of_them(
    eight: GlooWorkers, tmp_path: Path
):
    """As many data ranks as before: each has a place in the text."""
    case = on(LLAMA3, "1F1B", **FSDP, **TP)
    after = {"pipeline_parallel_degree": 4, "tensor_parallel_degree": 1}
    assert eight.run(resumed_state, case, after, str(tmp_path)) == [()] * 8
