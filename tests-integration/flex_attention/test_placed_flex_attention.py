"""Models with torchtitan's FlexAttention, placed by a solver on four ranks, against one process.

Loss, gradients and parameters of five steps, at float32 relative 1e-5 in norm. Masks are inputs:
every step has other documents.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from flex_attention.placed_cases import compare_placed
from placement.cases import PlacedCase, assert_agrees
from placement.placed_models import DEEPSEEK_V3, LLAMA3

from gt_config import AutoParallelConfig
from gt_trace.testing import GlooWorkers

BACKEND = {"inductor_compilation": "autoparallel_backend"}
LLAMA3_PLACED = PlacedCase(model=LLAMA3, memory_budget_gib=0.025)
DEEPSEEK_V3_PLACED = PlacedCase(model=DEEPSEEK_V3, memory_budget_gib=0.12)
ONE_SAMPLE = dataclasses.replace(LLAMA3, batch_size=1)


def check(case: PlacedCase, workers: GlooWorkers, folder: Path) -> None:
    results = workers.run(compare_placed, case, str(folder))
    assert_agrees([found for found, _ in results], tolerance=1e-5)
    assert results[0][0].num_sharded > 3
    cuts = results[0][1]
    # Forward and backward of every layer, and none of them runs whole.
    assert len(cuts) == 2 * case.model.num_layers
    assert all("S(" in cut for cut in cuts), cuts


def test_a_planned_llama3_trains_like_the_whole_model(four: GlooWorkers, tmp_path: Path) -> None:
    options = {"autoparallel_solver": AutoParallelConfig(relative_gap=0.03)}
    check(dataclasses.replace(LLAMA3_PLACED, options=options), four, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dataclasses.replace(LLAMA3_PLACED, options=BACKEND), id="llama3-backend"),
        # The mask of one sample is another function than that of the whole batch.
        pytest.param(PlacedCase(model=ONE_SAMPLE, memory_budget_gib=0.025), id="llama3-one-sample"),
        pytest.param(
            dataclasses.replace(LLAMA3_PLACED, options={"memory_policy": "full_recompute"}),
            id="llama3-full-recompute",
        ),
        pytest.param(DEEPSEEK_V3_PLACED, id="deepseek_v3"),
        pytest.param(
            dataclasses.replace(DEEPSEEK_V3_PLACED, options=BACKEND), id="deepseek_v3-backend"
        ),
    ],
)
def test_planned_models_train_like_the_whole_model(
    case: PlacedCase, four: GlooWorkers, tmp_path: Path
) -> None:
    check(case, four, tmp_path)
