"""What a placed run saves, any run goes on from: with its plan, another one, or none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from placement.placed_models import LLAMA3
from placement.resumption_cases import (
    ResumedCase,
    resume_elsewhere,
    with_the_plan_of_another,
)
from training_cases import compare_resumed

from gt_config import AutoParallelConfig
from gt_trace.testing import GlooWorkers

FOUR_DATA_RANKS = dataclasses.replace(
    LLAMA3, batch_size=1, parallelism={"data_parallel_shard_degree": 4}
)
SHARDING_BUDGET_GIB = 0.025
"""Replicated, parameters with gradients and optimizer state would take more than that."""


@pytest.mark.slow
def test_a_resumed_placed_run_equals_one_that_never_stopped(
    four: GlooWorkers, tmp_path: Path
) -> None:
    solver = AutoParallelConfig(memory_budget_gib=SHARDING_BUDGET_GIB)
    options = {"autoparallel": True, "autoparallel_solver": solver}
    found = four.run(compare_resumed, LLAMA3, str(tmp_path), "aot_fx_trace", options)
    assert found == [([], 2)] * 4


@pytest.mark.slow
def test_a_placed_run_is_resumed_on_another_mesh_or_under_other_parallelism(
    four: GlooWorkers, tmp_path: Path
) -> None:
    saved = ResumedCase(model=LLAMA3, memory_budget_gib=SHARDING_BUDGET_GIB)
    others = {
        "another mesh": ResumedCase(model=FOUR_DATA_RANKS, memory_budget_gib=SHARDING_BUDGET_GIB),
        "FSDP": ResumedCase(model=FOUR_DATA_RANKS, is_placed=False),
        "FSDP and TP": ResumedCase(model=LLAMA3, is_placed=False),
    }
    for rank in four.run(resume_elsewhere, saved, others, str(tmp_path)):
        assert rank.keys() == others.keys()
        for name, found in rank.items():
            assert found.differing == (), name
            assert found.num_compared > 30, name
            assert found.layouts_differ, name
            assert found.losses[1] == pytest.approx(found.losses[0], rel=1e-5), name
            assert found.worst_parameter[0] < 1e-5, (name, found.worst_parameter)


@pytest.mark.slow
def test_a_plan_is_found_once_and_kept_or_given(four: GlooWorkers, tmp_path: Path) -> None:
    case = ResumedCase(model=LLAMA3, memory_budget_gib=SHARDING_BUDGET_GIB)
    others = {"longer": dataclasses.replace(LLAMA3, seq_len=64), "data alone": FOUR_DATA_RANKS}
    for found in four.run(with_the_plan_of_another, case, others, str(tmp_path)):
        assert found.layouts_differ == {"resumed": False, "given": False}
        assert found.losses["resumed"] == found.losses["given"] == found.losses["saved"]
        # One rank reads the plan, and all say what it found.
        head = "the plan was made for something else; plan again:\n  - "
        assert found.refusals["longer"] == (
            f"{head}layers.0.attention.rope.cache is complex64[64, 8], planned for complex64[32, 8]\n"
            "  - input tokens is int64[4, 64], planned for int64[4, 32]\n"
            "  - input positions is int64[4, 64], planned for int64[4, 32]\n"
            "  - input attention_masks is bool[4, 1, 64, 64], planned for bool[4, 1, 32, 32]"
        )
        assert found.refusals["data alone"] == f"{head}mesh is fsdp 4, planned for tp 2 x fsdp 2"
