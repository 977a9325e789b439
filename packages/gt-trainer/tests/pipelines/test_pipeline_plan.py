"""What the pipeline options mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchtitan.config import ParallelismConfig

from gt_pipeline.schedules import schedule_of, schedule_to_csv
from gt_trainer.pipelines.pipeline_plan import pipeline_plan, rank_with_loss, ranks_of_pipelines


def options(**changes: object) -> ParallelismConfig:
    return ParallelismConfig(**{"pipeline_parallel_degree": 2, **changes})


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


def test_pipelines_are_the_outermost_axis_of_the_mesh():
    assert ranks_of_pipelines(2, 6) == [[0, 3], [1, 4], [2, 5]]
