"""Experts of placed models run in chunks, for EP overlap, and train like a whole model.

Float32 relative 1e-5 in norm, beside one process: chunks add gradients in another order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pipelines.cases import PipelineCase
from placement import pipeline_cases
from placement.cases import PlacedCase, assert_agrees, compare_with_whole_model
from placement.placed_models import DEEPSEEK_V3_EP4

from gt_config import AutoParallelConfig, EpOverlapConfig
from gt_trace.testing import GlooWorkers

OF_EXPERTS = EpOverlapConfig(enabled=True, module_fqn="layers.*.moe", chunk_dim="seq")
DEEPSEEK_V3_EP2 = replace(
    DEEPSEEK_V3_EP4,
    num_layers=4,
    parallelism={"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
)
SOLVER = AutoParallelConfig(relative_gap=0.1)
NUM_EXCHANGES = 5
"""Of one layer: counts, tokens and results, and the gradients of both."""


@pytest.mark.slow
def test_chunks_of_placed_experts_train_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    case = PlacedCase(
        model=DEEPSEEK_V3_EP4,
        options={"autoparallel_solver": SOLVER, "ep_overlap": OF_EXPERTS},
        experts="expert_parallel",
    )
    found = four.run(compare_with_whole_model, case, str(tmp_path))
    assert_agrees(found, tolerance=1e-5)
    for each in found:
        launched, planned = each.all_to_all_bytes
        assert each.num_exchanges == NUM_EXCHANGES
        assert each.miscounted == ()
        # Counts, tokens and results, and the gradients of both: of each half of the sequence.
        assert len(launched) == len(planned) + each.num_exchanges


@pytest.mark.slow
def test_chunks_of_paired_stages_train_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    solver = replace(SOLVER, experts="expert_parallel")
    case = PipelineCase(
        model=DEEPSEEK_V3_EP2,
        schedule="DualPipeV",
        options={"autoparallel": True, "autoparallel_solver": solver},
        overlap=OF_EXPERTS,
    )
    found = four.run(pipeline_cases.compare_placed_pipeline, case, str(tmp_path), None)
    pipeline_cases.assert_agrees(found)
