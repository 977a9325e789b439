"""What is refused of the pipeline options before a model exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchtitan.config import ParallelismConfig

from gt_config import Violation
from gt_pipeline.schedules import schedule_of, schedule_to_csv
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.preflight.pipeline_violations import pipeline_violations, stage_violations


def options(**changes: object) -> ParallelismConfig:
    return ParallelismConfig(**{"pipeline_parallel_degree": 2, **changes})


def violations(parallelism: ParallelismConfig, *, num_layers: int = 6, batch: int = 8):
    return list(stage_violations(parallelism, num_layers=num_layers, local_batch_size=batch))


def test_a_schedule_from_a_file_is_for_the_run_s_microbatches(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    schedule = schedule_of("Interleaved1F1B", num_ranks=2, num_stages=4, num_microbatches=8)
    schedule_to_csv(schedule, path)
    parallelism = options(pipeline_parallel_schedule_csv=str(path))
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
    config = llama3_debugmodel()
    config.parallelism = options(pipeline_parallel_schedule="2F2B")
    assert len([*pipeline_violations(config)]) == 1
    config.parallelism.pipeline_parallel_degree = 1
    assert [*pipeline_violations(config)] == []
