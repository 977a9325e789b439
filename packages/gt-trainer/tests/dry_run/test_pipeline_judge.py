"""A dry run of a pipeline reports the step that its run would take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gt_config import AutoParallelConfig
from gt_trainer.device import intended_for
from gt_trainer.dry_run import dry_run as module
from gt_trainer.dry_run import pipeline_judge
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.dry_run.pipeline_dry_run import PipelineDryRunReport, pipeline_dry_run
from gt_trainer.models import llama3
from gt_trainer.preflight.settled_defaults import settle_defaults, settled_by_hand
from gt_trainer.trainer import GraphTrainer

NUM_RANKS = 4


def pipeline(folder: Path) -> tuple[GraphTrainer.Config, GraphTrainer.Config]:
    """A placed pipeline of two layers on two stages of two ranks, and the same by hand."""
    config = llama3.llama3_debugmodel()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dump_folder = str(folder)
    config.training.local_batch_size, config.training.seq_len = 2, 32
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.data_parallel_shard_degree = 2
    solver = AutoParallelConfig(relative_gap=0.5)
    config.compile = dataclasses.replace(
        config.compile, autoparallel=True, autoparallel_solver=solver, verify_passes=False
    )
    by_hand = settled_by_hand(config, NUM_RANKS)
    assert by_hand is not None
    return settle_defaults(config, NUM_RANKS)[0], by_hand


def slower(seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Makes steps that a solver placed take so much longer; says whether each was placed."""
    placed: list[bool] = []

    def simulated(config: GraphTrainer.Config, *args: Any, **kwargs: Any) -> PipelineDryRunReport:
        report = pipeline_dry_run(config, *args, **kwargs)
        placed.append(config.compile.autoparallel)
        if not placed[-1]:
            return report
        step_us = report.simulated.step_us + seconds * 1e6
        late = dataclasses.replace(report.simulated, step_us=step_us)
        return dataclasses.replace(report, simulated=late)

    for each in (module, pipeline_judge):
        monkeypatch.setattr(each, "pipeline_dry_run", simulated)
    return placed


def test_the_step_by_hand_is_reported_where_it_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    placed = slower(1.0, monkeypatch)
    config, by_hand = pipeline(tmp_path)
    with intended_for("cuda"):
        report = dry_run(config, NUM_RANKS, by_hand=by_hand)
        judged = pipeline_judge.judge_before_training(config, by_hand, NUM_RANKS)
    assert isinstance(report, PipelineDryRunReport)
    assert placed == [True, False] * 2
    beside = report.beside_by_hand
    assert beside is not None
    assert report.simulated is beside.by_hand
    last = str(report).splitlines()[-1].strip()
    assert last == report.placement
    assert last.startswith("pipeline: by hand ")
    assert last.endswith(": taken")
    # Whoever starts comes to the same.
    assert str(judged) == last
    assert (tmp_path / "placement.json").is_file()
