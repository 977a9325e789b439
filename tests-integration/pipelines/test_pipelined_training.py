"""Captured pipelines of torchtitan's models compute the bits of the whole model, and of PyTorch.

Three runs of the same batches from the same weights on 2 pipeline x 2 data ranks: captured stages;
the whole model without a pipeline, its gradients summed over microbatches and then once over data
ranks; PyTorch's own pipeline runtime over the same stages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pipelines.cases import (
    PipelineCase,
    compare_pipelines,
    compare_pipelines_of_flex_attention,
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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            PipelineCase(model=LLAMA3, schedule="1F1B"), id="llama3-1F1B", marks=pytest.mark.slow
        ),
        pytest.param(
            PipelineCase(model=LLAMA3, schedule="ZBVZeroBubble"),
            id="llama3-ZBVZeroBubble",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PipelineCase(model=DEEPSEEK_V3, schedule="1F1B"),
            id="deepseek_v3-1F1B",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PipelineCase(model=DEEPSEEK_V3, schedule="DualPipeV"), id="deepseek_v3-DualPipeV"
        ),
    ],
)
def test_losses_and_gradients_are_those_of_the_whole_model_and_of_pytorchs_runtime(
    case: PipelineCase, four: GlooWorkers, tmp_path: Path
):
    found = four.run(compare_pipelines, case, str(tmp_path))
    assert [each.differences for each in found] == [()] * 4
    assert all(each.num_gradients > 10 for each in found)
    assert {len(each.losses) for each in found} == {0, 2 * 2 * case.num_microbatches}
    assert all("UNSHARD" in each.actions and "REDUCE_GRAD" in each.actions for each in found)


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
    assert {len(each.losses) for each in found} == {0, 2 * 2 * case.num_microbatches}


@pytest.mark.slow
def test_a_checkpoint_is_resumed_under_another_pipeline_degree(four: GlooWorkers, tmp_path: Path):
    case = PipelineCase(model=LLAMA3, schedule="1F1B")
    other = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2}
    assert four.run(resumed_state, case, other, str(tmp_path)) == [()] * 4
