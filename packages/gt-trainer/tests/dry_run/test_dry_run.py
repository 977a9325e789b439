"""A dry run of a pipeline reports the step that its run would take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gt_autoparallel import JudgedStep
from gt_config import AutoParallelConfig
from gt_passes.errors import GraphChunkingError
from gt_trainer.device import intended_for
from gt_trainer.dry_run import dry_run as module
from gt_trainer.dry_run.dry_run import captured_report, dry_run, judge_before_training
from gt_trainer.dry_run.dry_run_report import DryRunReport
from gt_trainer.models import llama3
from gt_trainer.placement.judged_run import judged_run, judgement_left
from gt_trainer.placement.pipeline_judgement import (
    PipelineJudgement,
    digest_of,
    written_judgement,
)
from gt_trainer.preflight.settled_defaults import settle_defaults, settled_by_hand
from gt_trainer.trainer import GraphTrainer

NUM_RANKS = 4


def pipeline(folder: Path) -> tuple[GraphTrainer.Config, GraphTrainer.Config]:
    """A placed pipeline of two layers on two stages of two ranks, and the same by hand."""
    config = llama3.llama3_debugmodel()
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    model.layers = model.layers[:2]
    config.dump_folder = str(folder)
    config.checkpoint.enable = True
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

    def simulated(config: GraphTrainer.Config, *args: Any, **kwargs: Any) -> DryRunReport:
        report = captured_report(config, *args, **kwargs)
        placed.append(config.compile.autoparallel)
        if not placed[-1]:
            return report
        found = report.simulated.sensitivity
        found = dataclasses.replace(found, time_us=found.time_us + seconds * 1e6)
        late = dataclasses.replace(report.simulated, sensitivity=found)
        return dataclasses.replace(report, simulated=late)

    monkeypatch.setattr(module, "captured_report", simulated)
    return placed


@pytest.mark.slow
def test_the_step_by_hand_is_reported_where_it_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    placed = slower(1.0, monkeypatch)
    config, by_hand = pipeline(tmp_path)
    with intended_for("cuda"):
        report = dry_run(config, NUM_RANKS, by_hand=by_hand)
        judged = judge_before_training(config, by_hand, NUM_RANKS)
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


def drawn(
    planned_ms: float | GraphChunkingError,
    by_hand_ms: float,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fits: bool = True,
) -> list[Any]:
    """Steps that nobody captures; says of each whether it was planned, and its trace."""
    asked: list[Any] = []

    def simulated(config: GraphTrainer.Config, *_: Any, **options: Any) -> DryRunReport:
        is_placed = config.compile.autoparallel
        asked.append((is_placed, options.get("trace_path")))
        if is_placed:
            Path(config.dump_folder, "placement.json").write_bytes(b"the plan")
        ms = planned_ms if is_placed else by_hand_ms
        if isinstance(ms, GraphChunkingError):
            raise ms
        values: dict[str, Any] = dict.fromkeys(
            each.name for each in dataclasses.fields(DryRunReport)
        )
        step = SimpleNamespace(step_us=1e3 * ms, peak_bytes=1, fits=fits)
        return DryRunReport(**{**values, "simulated": step})

    monkeypatch.setattr(module, "captured_report", simulated)
    return asked


def reported(folder: Path, trace: Path | None = None, **solver: Any) -> DryRunReport:
    config, by_hand = pipeline(folder)
    options = dataclasses.replace(config.compile.autoparallel_solver, **solver)
    config.compile = dataclasses.replace(config.compile, autoparallel_solver=options)
    with intended_for("cuda"):
        return dry_run(config, NUM_RANKS, by_hand=by_hand, trace_path=trace)


def test_what_is_drawn_is_the_step_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, trace = drawn(2, 1, monkeypatch), tmp_path / "trace.json"
    found = reported(tmp_path, trace)
    assert found.simulated.step_us == 1e3
    assert found.placement == "pipeline: by hand 1.0 ms is faster than the plan's 2.0 ms: taken"
    assert asked == [(True, trace), (False, None), (False, trace)]
    assert str(left_in(tmp_path)) == found.placement


def test_a_plan_whose_stages_cannot_run_in_chunks_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A start goes by what the dry run left, and comes to the same without."""
    asked = drawn(GraphChunkingError(["no rule", "others"]), 1, monkeypatch)
    found = reported(tmp_path, trace := tmp_path / "trace.json")
    assert found.placement == (
        "pipeline: by hand is taken, as the plan has no step: its step cannot run in the chunks of "
        "--compile.ep_overlap.enabled: no rule; others"
    )
    assert found.simulated.step_us == 1e3
    assert found.beside_by_hand is None
    assert asked == [(True, trace), (False, trace)]
    with intended_for("cuda"):
        judged = judge_before_training(*pipeline(tmp_path), NUM_RANKS)
    for each in (left_in(tmp_path), judged):
        assert each.takes_by_hand
        assert str(each) == found.placement


@pytest.mark.parametrize("solver", [{"plan": "placement.json"}, {"simulate_rivals": False}])
def test_a_plan_that_was_asked_for_and_cannot_run_in_chunks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, solver: dict[str, Any]
) -> None:
    drawn(GraphChunkingError(["no rule"]), 1, monkeypatch)
    with pytest.raises(GraphChunkingError, match="no rule"):
        reported(tmp_path, **solver)


def left_in(folder: Path) -> PipelineJudgement:
    """What a dry run left for a start."""
    left, plan = folder / "pipeline_judgement.json", folder / "placement.json"
    return judgement_left(left, plan, pipeline(folder)[0], NUM_RANKS)


def test_the_plan_is_reported_where_it_wins_and_left_for_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = drawn(1, 2, monkeypatch)
    (tmp_path / "pipeline_judgement.json").write_text("of a dry run before")
    found = reported(tmp_path)
    judged = left_in(tmp_path)
    assert str(judged) == found.placement
    assert judged.plan_digest == digest_of(b"the plan")
    assert found.simulated.step_us == 1e3
    assert found.placement == "pipeline: the plan's 1.0 ms are taken, by hand 2.0 ms"
    assert asked == [(True, None), (False, None)]


@pytest.mark.parametrize("solver", [{"plan": "placement.json"}, {"simulate_rivals": False}])
def test_a_plan_that_was_asked_for_is_compared_and_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, solver: dict[str, Any]
) -> None:
    drawn(2, 1, monkeypatch)
    found = reported(tmp_path, **solver)
    assert found.simulated.step_us == 2e3
    assert found.placement is None
    assert found.beside_by_hand is not None


@pytest.mark.parametrize("fits", [True, False])
def test_what_was_judged_before_is_all_that_is_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, fits: bool
) -> None:
    asked = drawn(2, 1, monkeypatch, fits=fits)
    monkeypatch.setattr(module, "_remedy", lambda config, *_: f"{config.compile.autoparallel}")
    steps = (JudgedStep(step_us=us, peak_bytes=1, fits=True) for us in (2e3, 1e3))
    made_for = judged_run(pipeline(tmp_path)[0], NUM_RANKS)
    judgement = PipelineJudgement(planned=next(steps), by_hand=next(steps), made_for=made_for)
    checkpoint = tmp_path / "checkpoint" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    kept = checkpoint.parent / "placed_by_hand.json"
    kept.write_bytes(written_judgement(judgement))
    found = reported(tmp_path)
    assert found.placement == f"{judgement}, kept in {kept}"
    assert asked == [(False, None)]
    assert found.remedy == (None if fits else "False")
