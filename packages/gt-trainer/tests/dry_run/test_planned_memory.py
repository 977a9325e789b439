"""A plan's account of memory, with that of the loss, holds what the captured step is estimated at.

The account may be above the estimate: it adds up the loss and what a layer computes again, which
are not alive at one time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gt_autoparallel import PlacementPlan
from gt_trainer import device
from gt_trainer.dry_run.dry_run import DryRunReport, dry_run
from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.placement import place_decoder as placing
from gt_trainer.placement.memory_budget import loss_bytes
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.trainer import GraphTrainer

RANKS, GIB = 4, 2**30
MODELS = {"llama3": llama3.llama3_debugmodel, "deepseek_v3": deepseek_v3.deepseek_v3_debugmodel}


def account_and_estimate(
    config: GraphTrainer.Config, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Bytes of the plan and the loss, and of the captured step and the optimizer."""
    found: list[int] = []
    original = placing.placement_plan

    def noting(model, mesh, blocks, *, training, solver, judge) -> PlacementPlan:
        plan = original(model, mesh, blocks, training=training, solver=solver, judge=judge)
        samples, vocab = training.local_batch_size, model.config.vocab_size
        of_loss = loss_bytes(mesh, training, num_samples=samples, vocab_size=vocab)
        found.append(plan.memory.total + of_loss)
        return plan

    monkeypatch.setattr(placing, "placement_plan", noting)
    with device.intended_for("cuda"):
        settled, _ = settle_defaults(config, RANKS)
        report = dry_run(settled, RANKS)
    assert isinstance(report, DryRunReport)
    monkeypatch.setattr(placing, "placement_plan", original)
    return found[-1], report.simulated.peak_bytes


@pytest.mark.parametrize("name", list(MODELS))
def test_no_captured_step_takes_a_twentieth_more_than_its_plan_says(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = MODELS[name]()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dump_folder = str(tmp_path)
    config.compile = replace(config.compile, autoparallel=True)
    account, estimate = account_and_estimate(config, monkeypatch)
    assert 0.95 * estimate <= account <= 1.1 * estimate
    solver = replace(config.compile.autoparallel_solver, memory_budget_gib=0.9 * account / GIB)
    config.compile = replace(config.compile, autoparallel_solver=solver)
    less, estimate = account_and_estimate(config, monkeypatch)
    assert less <= 0.9 * account
    assert 0.95 * estimate <= less <= 1.15 * estimate
