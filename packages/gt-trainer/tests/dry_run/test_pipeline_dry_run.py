"""A pipeline on paper: debug models on ranks that do not exist."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gt_pipeline.schedules import simulate
from gt_trainer.device import intended_for
from gt_trainer.dry_run.dry_run import changes_that_need_less, dry_run
from gt_trainer.dry_run.dry_run_report import DryRunReport
from gt_trainer.dry_run.fake_step import fake_ranks
from gt_trainer.dry_run.step_over_time import memory_over_step, step_timeline
from gt_trainer.pipelines.split_model import names_of_first_rank
from gt_trainer.preflight.preflight import check_configuration, configuration_violations
from gt_trainer.preflight.settled_defaults import settle_defaults
from gt_trainer.trainer import GraphTrainer


def run(
    name: str, world_size: int, *, batch_size: int, folder: Path | None = None, **parallelism: Any
) -> DryRunReport:
    """As ``gt-train --dry-run`` does it."""
    with intended_for("cuda"):
        module = name.removesuffix("_debugmodel")
        config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
        spec = config.model_spec
        # Two layers for each stage are enough.
        layers = spec.model.layers[:4]
        config.model_spec = dataclasses.replace(
            spec, model=dataclasses.replace(spec.model, layers=layers)
        )
        config.training.local_batch_size = batch_size
        for field, value in parallelism.items():
            setattr(config.parallelism, field, value)
        config.compile = dataclasses.replace(config.compile, verify_passes=False)
        config, _ = settle_defaults(config, world_size)
        check_configuration(config, world_size, will_train=False)
        return dry_run(
            config,
            world_size,
            trace_path=folder and folder / "schedule.json",
            timeline_path=folder and folder / "ranks.html",
        )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module")
def dense(written: Path) -> DryRunReport:
    """PP 2 x TP 2 x FSDP 2."""
    return run(
        "llama3_debugmodel",
        8,
        batch_size=4,
        folder=written,
        pipeline_parallel_degree=2,
        tensor_parallel_degree=2,
        pipeline_parallel_schedule="1F1B",
    )


@cache
def experts() -> DryRunReport:
    """PP 2 x EP 2 x FSDP 2, a forward and a backward at once."""
    return run(
        "deepseek_v3_debugmodel",
        8,
        batch_size=8,
        pipeline_parallel_degree=2,
        expert_parallel_degree=2,
        pipeline_parallel_schedule="DualPipeV",
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )


def test_a_timeline_has_a_row_for_each_rank(dense: DryRunReport) -> None:
    timeline = step_timeline(dense.simulated)
    assert [each.name for each in timeline.rows] == ["rank 0", "rank 1"]
    for row in timeline.rows:
        assert {each.kind for each in row.bars} == {"forward", "backward", "optimizer"}
        assert max(each.end_us for each in row.bars) == timeline.end_us
    assert timeline.what == "a step, on the ranks of a pipeline"


def check_sums(report: DryRunReport) -> None:
    """Parts add up: of the step, of an action's time, and of each rank's peak."""
    simulated = report.simulated
    assert simulated.schedule is not None
    time = simulated.schedule.time
    parts = (time.actions, time.bubble, time.transfers, time.gathers)
    assert sum(parts) == pytest.approx(time.makespan)
    inside = simulated.computing_us + sum(simulated.exposed_us.values()) + simulated.waiting_us
    assert inside == pytest.approx(time.actions)
    behind = simulated.schedule.shared_us + simulated.optimizer_us
    assert simulated.step_us == pytest.approx(time.makespan + behind)
    assert report.schedule is not None
    assert len(simulated.memory) == report.schedule.num_ranks
    for rank in simulated.memory:
        assert sum(rank.peak.bytes_by_part.values()) == rank.peak_bytes
    assert simulated.peak_bytes == max(rank.peak_bytes for rank in simulated.memory)
    over_step = memory_over_step(simulated)
    assert max(each.num_bytes for each in over_step.moments) == simulated.peak_bytes
    assert over_step.what == f"the step, on pipeline rank {simulated.fullest.rank}"


def test_a_dense_pipeline_is_simulated_on_all_its_ranks(dense: DryRunReport) -> None:
    check_sums(dense)
    assert dict(dense.degrees) == {"pp": 2, "dp_shard": 2, "tp": 2}
    # Each rank holds a quarter of its stage, and the two stages are the model.
    assert sum(dense.parameters_by_rank) == pytest.approx(dense.num_parameters / 4, rel=0.01)
    simulated = dense.simulated
    assert list(simulated.exposed_us) == ["tensor parallel"]
    assert simulated.schedule is not None
    assert simulated.schedule.time.gathers > 0  # nothing can hide those of the first microbatch
    assert simulated.facts.tokens == 4 * 2 * 256  # samples of a rank, data-parallel ranks, tokens
    assert simulated.assumed_symbols == ()
    assert simulated.num_unsized == 0


def test_stages_with_experts_overlap_and_exchange_balanced_tokens() -> None:
    report = experts()
    check_sums(report)
    simulated = report.simulated
    assert {"EP token exchange", "EP token count exchange"} <= simulated.exposed_us.keys()
    assert simulated.assumed_symbols == ()
    assert simulated.num_unsized == 0
    assert simulated.schedule is not None
    spans = simulated.schedule.time.timeline.spans
    pairs = [span for span in spans if span.action.kind == "OVERLAP_F_B"]
    assert pairs
    assert all(span.duration > 0 for span in pairs)


def test_stages_that_are_alike_are_captured_once() -> None:
    # Four stages of one layer: the first is dense and embeds, the last has the loss.
    assert [each.stages for each in experts().captured] == ["0", "1-2", "3"]


def test_the_report_says_what_each_rank_holds(dense: DryRunReport) -> None:
    lines = str(dense).splitlines()
    assert lines[0] == "Dry run of llama3 debugmodel on 8 ranks (pp 2 x dp_shard 2 x tp 2)"
    assert "  pipeline         1F1B, 2 ranks, 2 stages" in lines
    assert "  batch            4 microbatches of 1 x 256 tokens, 2,048 a step" in lines
    assert any(line.startswith("Simulated on 8 H100 SXM, by a model of") for line in lines)
    assert any(re.fullmatch(r"  capture          .* s; 2 stages stand for all 2", e) for e in lines)
    assert any(re.fullmatch(r"  passes           [\d.]+ s", line) for line in lines)
    exposed = [line for line in lines if line.startswith("  exposed ")]
    (total,) = dense.simulated.by_purpose
    once = [record for each in dense.simulated.runs for record in each.graph.collectives]
    assert total.count == len(once) * 4 / 2  # 4 microbatches; the mean over 2 ranks
    assert re.fullmatch(rf".* ms of .* ms: {total.count:g} tensor parallel", exposed[0])
    ranks = [line for line in lines if line.startswith("    rank ")]
    assert len(ranks) == 2
    assert all("optimizer state" in line for line in ranks)


@cache
def tied(schedule: str) -> DryRunReport:
    """PP 2 x FSDP 2."""
    return run(
        "qwen3_debugmodel",
        4,
        batch_size=4,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
    )


def test_a_tied_weight_is_stored_on_two_ranks_and_counted_once_in_the_model() -> None:
    report = tied("1F1B")
    check_sums(report)
    weight = 2048 * 256
    assert sum(report.parameters_by_rank) == (report.num_parameters + weight) / 2  # FSDP 2


def test_its_gradient_is_exchanged_between_both_behind_the_schedule() -> None:
    report = tied("1F1B")
    assert report.simulated.schedule is not None
    assert report.simulated.schedule.shared_us > 0
    assert any(line.endswith("gradients of the tied weight") for line in str(report).splitlines())


def test_where_one_rank_has_both_stages_nothing_is_exchanged() -> None:
    report = tied("ZBVZeroBubble")
    check_sums(report)
    assert report.simulated.schedule is not None
    assert report.simulated.schedule.shared_us == 0
    assert "tied weight" not in str(report)


def test_the_schedule_is_written_as_a_trace_and_as_a_page(
    dense: DryRunReport, written: Path
) -> None:
    events = json.loads((written / "schedule.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(dense.simulated.run_us)
    assert (written / "ranks.html").read_text().count(">rank 1</span>") == 1


def test_gathers_run_beside_computation_as_they_do_in_a_run(dense: DryRunReport) -> None:
    schedule = dense.simulated.schedule
    assert schedule is not None
    costs = {span.action: span.duration for span in schedule.time.timeline.spans}
    waits = simulate(schedule.lowered, costs.__getitem__, overlap_gathers=False)
    assert schedule.time.makespan <= waits.makespan
    assert "UNSHARD and REDUCE_GRAD, beside computation" in str(dense)


def test_a_pipeline_that_does_not_fit_may_put_off_fewer_dw_and_cut_its_microbatches() -> None:
    config = importlib.import_module("gt_trainer.models.llama3").llama3_debugmodel()
    config.compile = dataclasses.replace(config.compile, memory_policy="full_recompute")
    config.training.local_batch_size = 16
    config.parallelism.pipeline_parallel_degree = 4
    config.parallelism.pipeline_parallel_schedule = "DualPipeV"
    config.parallelism.pipeline_parallel_microbatch_size = 2

    def is_allowed(changed: GraphTrainer.Config) -> bool:
        return next(configuration_violations(changed, 8), None) is None

    fewest = "--compile.pipeline_deferred_weights 1"
    smallest = f"{fewest} --parallelism.pipeline_parallel_microbatch_size 1"
    assert [flags for flags, _ in changes_that_need_less(config, is_allowed)] == [
        "--compile.pipeline_deferred_weights 2",
        fewest,
        smallest,
        f"{smallest} --training.local_batch_size 8",
    ]


def test_a_run_that_does_not_fit_may_compute_ever_more_again() -> None:
    config = importlib.import_module("gt_trainer.models.llama3").llama3_debugmodel()
    config.compile = dataclasses.replace(config.compile, memory_policy="save_all")
    config.training.local_batch_size = 1
    assert [flags for flags, _ in changes_that_need_less(config, lambda _: True)] == [
        "--compile.memory_policy selective",
        "--compile.memory_policy selective_alternate",
        "--compile.memory_policy full_recompute",
    ]


def balanced(schedule: str) -> DryRunReport:
    return run(
        "llama3_debugmodel",
        2,
        batch_size=8,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_balance="simulated",
    )


def test_stages_are_balanced_by_simulated_time() -> None:
    """The output with the loss costs more than a layer, the embedding next to nothing."""
    report, balance = balanced("1F1B"), balanced("1F1B").balance
    assert report.balance is not None
    assert balance is not None
    assert [stage.names for stage in report.balance.stages] == [
        ("tok_embeddings", "layers.0", "layers.1", "layers.2"),
        ("layers.3", "norm", "lm_head"),
    ]
    # Nothing is measured: whoever simulates finds the same.
    assert dataclasses.replace(balance, seconds=0) == dataclasses.replace(report.balance, seconds=0)
    by_layers = run(
        "llama3_debugmodel",
        2,
        batch_size=8,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="1F1B",
    )
    assert by_layers.balance is None
    assert report.simulated.step_us < by_layers.simulated.step_us
    # What single modules predict is what captured stages take.
    assert report.balance.makespan_us == pytest.approx(report.simulated.run_us, rel=0.05)
    assert report.balance.peak_bytes == pytest.approx(report.simulated.peak_bytes, rel=0.1)
    before = report.balance.makespan_before_us
    assert before == pytest.approx(by_layers.simulated.run_us, rel=0.05)


def test_the_report_says_what_balancing_gained() -> None:
    lines = str(balanced("1F1B")).splitlines()
    [found] = [line for line in lines if line.startswith("Stages balanced by")]
    assert re.fullmatch(
        r"Stages balanced by simulated time on H100 SXM: [\d.]+ ms a run of the schedule, "
        r"[\d.]+% less than [\d.]+ ms by layers",
        found,
    )
    assert any(
        re.fullmatch(r"    stage 0 .*ms: tok_embeddings, layers.0 to 2 \(by layers .* ms\)", line)
        for line in lines
    )


def test_stages_of_which_two_share_a_rank_and_actions_are_balanced_too() -> None:
    """DualPipeV runs a forward and a backward of two stages as one."""
    report = balanced("DualPipeV")
    assert report.balance is not None
    names = [name for stage in report.balance.stages for name in stage.names]
    assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "lm_head"]
    assert report.balance.makespan_us <= report.balance.makespan_before_us
    assert report.balance.makespan_us == pytest.approx(report.simulated.run_us, rel=0.1)


def test_ranks_without_stages_of_the_first_are_told_what_lacks() -> None:
    with fake_ranks(2), pytest.raises(RuntimeError) as caught:
        names_of_first_rank(None)
    assert str(caught.value) == (
        "no stages were balanced before training: gt_trainer.run.train does it on rank 0, or give "
        "them by --parallelism.module_fqns_per_model_part"
    )
