"""Stages that a solver placed, on four ranks, compute what the whole model computes on one.

Loss, every gradient, five optimizer steps and an evaluation, at float32 relative 1e-5 in norm.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pipelines.cases import PipelineCase
from placement.pipeline_cases import AUTOPARALLEL, assert_agrees, compare_placed_pipeline
from training_cases import Case

from gt_trace.testing import GlooWorkers

FSDP = {"data_parallel_shard_degree": 2}
TP = {"tensor_parallel_degree": 2}
QWEN3 = Case(module="qwen3", config="qwen3_debugmodel", seq_len=32, parallelism=FSDP)
DEEPSEEK_V3 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    parallelism={**FSDP, "expert_parallel_degree": 2},
)


def on(schedule: str = "1F1B", num_layers: int = 2, **parallelism: int) -> PipelineCase:
    model = Case(
        module="llama3",
        config="llama3_debugmodel",
        num_layers=num_layers,
        seq_len=32,
        parallelism=parallelism,
    )
    return of(model, schedule)


def of(model: Case, schedule: str = "1F1B") -> PipelineCase:
    return PipelineCase(model=model, schedule=schedule, options=AUTOPARALLEL)


def test_placed_stages_of_two_data_ranks_train_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    # Replicated, a stage with gradients and optimizer state would take more than that.
    found = four.run(compare_placed_pipeline, on(**FSDP), str(tmp_path), 0.02)
    assert_agrees(found)
    assert min(each.num_sharded for each in found) > 3
    # Parameters are gathered and gradients reduced by actions of their own.
    assert all(each.per_step["fsdp"] > 0 for each in found)
    assert "stage 0" in (tmp_path / "placement.json").read_text()
    assert "layers.1" in (tmp_path / "placement_stage_1.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "gib"),
    [
        pytest.param(on(**TP), 0.02, id="llama3-TP"),
        # Alike stages: the second and the third of four.
        pytest.param(on("Interleaved1F1B", 6, **FSDP), 0.06, id="llama3-interleaved"),
        pytest.param(on("ZBVZeroBubble", 4, **TP), 0.06, id="llama3-zero-bubble-V"),
        # One weight on both stages.
        pytest.param(of(QWEN3), None, id="qwen3-tied"),
        pytest.param(of(DEEPSEEK_V3), 0.12, id="deepseek_v3-EP"),
    ],
)
def test_placed_stages_train_like_the_whole_model(
    case: PipelineCase, gib: float | None, four: GlooWorkers, tmp_path: Path
) -> None:
    assert_agrees(four.run(compare_placed_pipeline, case, str(tmp_path), gib))
