"""A weight that is embedding and output projection at once, on two stages of a pipeline.

Compared with the whole model whose two uses have their gradients apart: the pipeline sums each of
them over microbatches, and over ranks, before it adds them. Within a microbatch first, as a tied
model in one piece does, rounds otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipelines.cases import (
    NUM_BATCHES,
    PipelineCase,
)
from pipelines.tied_cases import (
    TIED,
    accumulated_gradients,
    compare_tied,
    published_weights,
    resumed_tied,
    trained_tied,
)
from training_cases import Case

from gt_trace.testing import GlooWorkers

QWEN3 = Case(module="qwen3", config="qwen3_debugmodel", seq_len=32)
TP = {"tensor_parallel_degree": 2}
FSDP = {"data_parallel_shard_degree": 2}
PP, WHOLE = {"pipeline_parallel_degree": 2}, {"pipeline_parallel_degree": 1}


@pytest.fixture(scope="module")
def two() -> Iterator[GlooWorkers]:
    """Two ranks, of one pipeline."""
    with GlooWorkers(2, timeout=600, preload=["gt_trainer.testing"]) as workers:
        yield workers


def on(schedule: str, num_layers: int = 4, **parallelism: int | bool) -> PipelineCase:
    model = dataclasses.replace(QWEN3, num_layers=num_layers, parallelism=parallelism)
    return PipelineCase(model=model, schedule=schedule)


def slow(case: PipelineCase, name: str) -> Any:
    return pytest.param(case, NUM_BATCHES, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "num_batches"),
    [
        pytest.param(on("1F1B", num_layers=2), 2, id="1F1B, two steps"),
        slow(on("1F1B"), "1F1B"),
        slow(on("Interleaved1F1B"), "Interleaved1F1B"),
        slow(on("ZBVZeroBubble"), "ZBVZeroBubble"),
    ],
)
def test_both_copies_train_as_one_weight(
    case: PipelineCase, num_batches: int, two: GlooWorkers, tmp_path: Path
):
    found = two.run(compare_tied, case, str(tmp_path), True, num_batches)
    assert [each.differences for each in found] == [()] * 2
    assert sorted(name for each in found for name in each.copies) == sorted(TIED)
    assert all(each.num_gradients > 10 for each in found)


@pytest.mark.parametrize(
    ("case", "num_batches"),
    [
        slow(on("1F1B", **FSDP), "FSDP 2-1F1B"),
        slow(on("ZBVZeroBubble", **FSDP), "FSDP 2-ZBVZeroBubble"),
        slow(on("DualPipeV", **FSDP), "FSDP 2-DualPipeV"),
        slow(on("1F1B", data_parallel_replicate_degree=2), "replicas 2-1F1B"),
        slow(on("1F1B", **TP), "TP 2-1F1B"),
    ],
)
def test_so_they_do_on_several_ranks_each(
    case: PipelineCase, num_batches: int, four: GlooWorkers, tmp_path: Path
):
    found = four.run(compare_tied, case, str(tmp_path), False, num_batches)
    assert [each.differences for each in found] == [()] * 4
    assert all(each.num_gradients > 10 for each in found)


@pytest.mark.parametrize(
    ("case", "num_batches"),
    [
        slow(on("1F1B", **FSDP, **TP), "FSDP 2 x TP 2"),
        slow(on("1F1B", **FSDP, data_parallel_replicate_degree=2), "HSDP 2 x 2"),
    ],
)
def test_so_they_do_on_eight_ranks(
    case: PipelineCase, num_batches: int, eight: GlooWorkers, tmp_path: Path
):
    found = eight.run(compare_tied, case, str(tmp_path), False, num_batches)
    assert [each.differences for each in found] == [()] * 8


@pytest.mark.slow
def test_eager_stages_sum_what_each_run_of_the_schedule_adds(two: GlooWorkers, tmp_path: Path):
    assert two.run(accumulated_gradients, on("1F1B"), str(tmp_path)) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_eager_stages_of_several_data_ranks_train_as_captured_ones(
    schedule: str, four: GlooWorkers, tmp_path: Path
):
    case = on(schedule, **FSDP)
    eager = four.run(trained_tied, case, "none", str(tmp_path / "eager"))
    captured = four.run(trained_tied, case, "aot_fx_trace", str(tmp_path / "captured"))
    assert [problems for _, problems in (*eager, *captured)] == [[]] * 8
    assert len(captured[0][0]) == 2
    # Eager stages reduce after each microbatch, captured ones once.
    assert eager[0][0] == pytest.approx(captured[0][0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        (on("1F1B", **FSDP), PP, {**WHOLE, **TP}),
        (on("1F1B", **FSDP), {**WHOLE, **TP}, PP),
        (on("ZBVZeroBubble", **FSDP), PP, {**WHOLE, **TP}),
        (on("ZBVZeroBubble", **FSDP), {**WHOLE, **TP}, PP),
    ],
    ids=["from 1F1B", "to 1F1B", "from a V", "to a V"],
)
def test_a_checkpoint_goes_on_with_and_without_the_pipeline(
    case: PipelineCase,
    before: dict[str, int],
    after: dict[str, int],
    four: GlooWorkers,
    tmp_path: Path,
):
    found = four.run(resumed_tied, case, before, after, str(tmp_path))
    assert [each.differences for each in found] == [()] * 4
    # As torchtitan saves a tied model: weights under both names, the optimizer's state once.
    names = found[0].saved_names
    assert set(TIED) <= names
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in names
    assert not any(name.startswith("optimizer.") and "lm_head" in name for name in names)


@pytest.mark.slow
def test_weights_travel_through_hugging_faces_files(four: GlooWorkers, tmp_path: Path):
    assert four.run(published_weights, on("1F1B", **FSDP), str(tmp_path)) == [()] * 4
