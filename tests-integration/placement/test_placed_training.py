"""Models that a solver placed on four ranks compute what the whole model computes on one.

Loss, every gradient and five optimizer steps, at float32 relative 1e-5 in norm; and the collectives
of the captured step are exactly those that the plan predicted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from placement.cases import PlacedCase, assert_agrees, compare_with_whole_model
from placement.module_cases import placed_beside_whole
from placement.placed_models import DEEPSEEK_V3, LLAMA3, QWEN3
from training_cases import Case

from gt_config import AutoParallelConfig
from gt_trace.testing import GlooWorkers


def on(case: Case, **degrees: int) -> Case:
    """The same global batch on another mesh, of data-parallel axes only."""
    return dataclasses.replace(case, batch_size=case.batch_size // 2, parallelism=degrees)


def test_a_planned_llama3_trains_like_the_whole_model(four: GlooWorkers, tmp_path: Path) -> None:
    # Replicated, parameters with gradients and optimizer state would take more than that.
    # And any plan of about this price will do.
    options = {"autoparallel_solver": AutoParallelConfig(relative_gap=0.03)}
    case = PlacedCase(model=LLAMA3, memory_budget_gib=0.025, options=options)
    found = four.run(compare_with_whole_model, case, str(tmp_path))
    assert_agrees(found, tolerance=1e-5)
    assert found[0].num_sharded > 3
    assert "layers.0" in (tmp_path / "placement.html").read_text()


def test_a_module_placed_with_its_loss_has_the_gradients_of_the_whole_batch(
    four: GlooWorkers,
) -> None:
    for layouts, found in four.run(placed_beside_whole):
        assert any("Shard" in each for each in layouts)
        assert len(found) == 5
        for whole, placed in found.values():
            torch.testing.assert_close(placed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(PlacedCase(model=LLAMA3, mode="none"), id="llama3-eager"),
        pytest.param(
            PlacedCase(model=on(LLAMA3, data_parallel_shard_degree=4), memory_budget_gib=0.025),
            id="llama3-one-axis",
        ),
        pytest.param(
            PlacedCase(
                model=on(LLAMA3, data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
                memory_budget_gib=0.025,
            ),
            id="llama3-two-data-axes",
        ),
        pytest.param(
            PlacedCase(
                model=dataclasses.replace(LLAMA3, num_layers=2),
                memory_budget_gib=0.03,
                options={"memory_policy": "full_recompute"},
            ),
            id="llama3-full-recompute",
        ),
        pytest.param(PlacedCase(model=QWEN3), id="qwen3"),
    ],
)
def test_planned_dense_models_train_like_the_whole_model(
    case: PlacedCase, four: GlooWorkers, tmp_path: Path
) -> None:
    assert_agrees(four.run(compare_with_whole_model, case, str(tmp_path)), tolerance=1e-5)


@pytest.mark.slow
def test_a_planned_deepseek_v3_trains_like_the_whole_model(
    four: GlooWorkers, tmp_path: Path
) -> None:
    # The budget makes the plan shard experts, over ep or otherwise.
    case = PlacedCase(model=DEEPSEEK_V3, memory_budget_gib=0.12)
    found = four.run(compare_with_whole_model, case, str(tmp_path))
    assert_agrees(found, tolerance=1e-5)
    assert found[0].num_sharded > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(PlacedCase(model=LLAMA3, memory_budget_gib=0.025), id="llama3"),
        pytest.param(
            PlacedCase(model=DEEPSEEK_V3, memory_budget_gib=0.12),
            id="deepseek_v3",
        ),
    ],
)
def test_the_backend_of_autoparallel_computes_the_same(
    case: PlacedCase, four: GlooWorkers, tmp_path: Path
) -> None:
    """As the native recipe is, it is compared with the whole model: float32, rounded by Inductor."""
    backend = {"inductor_compilation": "autoparallel_backend"}
    case = dataclasses.replace(case, options=backend)
    assert_agrees(four.run(compare_with_whole_model, case, str(tmp_path)), tolerance=1e-5)
