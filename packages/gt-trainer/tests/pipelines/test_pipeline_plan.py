"""What the pipeline options mean, and what is refused before a model exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchtitan.config import ParallelismConfig

from gt_config import Violation
from gt_pipeline.schedules import schedule_of, schedule_to_csv
from gt_trainer.pipelines.pipeline_plan import pipeline_plan, pipeline_violations, rank_with_loss


def options(**changes: object) -> ParallelismConfig:
    return ParallelismConfig(**{"pipeline_parallel_degree": 2, **changes})


def violations(parallelism: ParallelismConfig, *, num_layers: int = 6, batch: int = 8):
    return list(pipeline_violations(parallelism, num_layers=num_layers, local_batch_size=batch))


def test_one_stage_a_rank_by_1f1b():
    plan = pipeline_plan(
        options(pipeline_parallel_schedule="1F1B"), num_layers=6, local_batch_size=8
    )
    assert plan.names_per_stage == (
        ("tok_embeddings", "layers.0", "layers.1", "layers.2"),
        ("layers.3", "layers.4", "layers.5", "norm", "lm_head"),
    )
    assert plan.schedule.num_microbatches == 8
    assert plan.schedule.stage_to_rank == (0, 1)


def test_two_stages_a_rank_in_a_v():
    plan = pipeline_plan(
        options(pipeline_parallel_schedule="ZBVZeroBubble"), num_layers=6, local_batch_size=8
    )
    assert len(plan.names_per_stage) == 4
    assert plan.schedule.stage_to_rank == (0, 1, 1, 0)


def test_stages_can_be_given_by_name():
    names = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    plan = pipeline_plan(
        options(pipeline_parallel_schedule="GPipe", module_fqns_per_model_part=names),
        num_layers=2,
        local_batch_size=4,
    )
    assert plan.names_per_stage == tuple(map(tuple, names))


def test_a_schedule_from_a_file(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    schedule = schedule_of("Interleaved1F1B", num_ranks=2, num_stages=4, num_microbatches=8)
    schedule_to_csv(schedule, path)
    parallelism = options(pipeline_parallel_schedule_csv=str(path))
    plan = pipeline_plan(parallelism, num_layers=6, local_batch_size=8)
    assert plan.schedule.compute == schedule.compute
    assert len(plan.names_per_stage) == 4
    assert violations(parallelism) == []
    assert [v.allowed for v in violations(parallelism, batch=4)] == [
        "a schedule for 4 microbatches; it has 8"
    ]


def test_microbatches_divide_the_batch():
    assert violations(options(pipeline_parallel_microbatch_size=3)) == [
        Violation(
            flag="--parallelism.pipeline_parallel_microbatch_size",
            value=3,
            allowed="a divisor of --training.local_batch_size 8",
            fix="use one of 1, 2, 4, 8",
        )
    ]


@pytest.mark.parametrize(
    ("changes", "layers", "problem"),
    [
        ({"pipeline_parallel_schedule": "2F2B"}, 6, "schedule '2F2B'"),
        ({"pipeline_parallel_degree": 16}, 6, "there are only 8 layers counted"),
    ],
)
def test_what_does_not_fit_is_one_violation_with_the_reason(changes, layers, problem):
    [violation] = violations(options(**changes), num_layers=layers, batch=64)
    assert violation.flag == "--parallelism.pipeline_parallel_schedule"
    assert problem in violation.fix


def test_a_missing_file_is_named():
    [violation] = violations(options(pipeline_parallel_schedule_csv="/no/such.csv"))
    assert violation == Violation(
        flag="--parallelism.pipeline_parallel_schedule_csv",
        value="/no/such.csv",
        allowed="a file that exists",
        fix="give the path of a schedule, or leave the flag out",
    )


def test_without_a_pipeline_nothing_is_judged():
    assert violations(options(pipeline_parallel_degree=1, pipeline_parallel_schedule="2F2B")) == []


@pytest.mark.parametrize(
    ("schedule", "degree", "expected"),
    [
        ("1F1B", 1, 0),
        ("1F1B", 2, 4),
        ("Interleaved1F1B", 4, 6),
        ("ZBVZeroBubble", 2, 0),
        ("DualPipeV", 4, 0),
    ],
)
def test_the_loss_is_where_the_last_stage_is(schedule: str, degree: int, expected: int):
    assert (
        rank_with_loss(schedule=schedule, csv_path=None, pipeline_degree=degree, world_size=8)
        == expected
    )
