"""A plan's account of memory is what the captured step is estimated at, to a twentieth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gt_autoparallel import PlacementPlan
from gt_config import AutoParallelConfig
from gt_trainer import device
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.placement import place_decoder as placing
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.trainer import GraphTrainer

RANKS, GIB = 4, 2**30
MODELS = {"llama3": llama3.llama3_debugmodel, "deepseek_v3": deepseek_v3.deepseek_v3_debugmodel}
CASES = [
    ("llama3", 0.65),  # the loss is the fullest moment
    ("deepseek_v3", 0.9),  # the backward is; in 0.8 the search takes long to close
]
"""Models of two layers, and shares of what a plan takes without need."""


def account_and_estimate(
    config: GraphTrainer.Config, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Bytes of the plan, and of the captured step and the optimizer."""
    found: list[int] = []
    original = placing.placement_plan

    def noting(model, mesh, blocks, *, training, solver, judge) -> PlacementPlan:
        plan = original(model, mesh, blocks, training=training, solver=solver, judge=judge)
        found.append(plan.memory.total)
        return plan

    monkeypatch.setattr(placing, "placement_plan", noting)
    monkeypatch.setattr(placing, "reasons_of_dry_run", lambda plan: {})  # which take seconds
    with device.intended_for("cuda"):
        settled, _ = settle_defaults(config, RANKS)
        report = dry_run(settled, RANKS)
    monkeypatch.setattr(placing, "placement_plan", original)
    return found[-1], report.simulated.peak_bytes


@pytest.mark.parametrize(("name", "share"), CASES)
def test_a_plan_takes_what_its_step_does(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = MODELS[name]()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dump_folder = str(tmp_path)
    config.compile = replace(config.compile, autoparallel=True)
    free, estimate = account_and_estimate(config, monkeypatch)
    assert 0.95 * estimate <= free <= 1.05 * estimate
    solver = AutoParallelConfig(memory_budget_gib=share * free / GIB)
    config.compile = replace(config.compile, autoparallel_solver=solver)
    account, estimate = account_and_estimate(config, monkeypatch)
    assert account <= share * free
    assert 0.95 * estimate <= account <= 1.05 * estimate
