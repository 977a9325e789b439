"""What is wrong with a pipeline is raised when its runner is made, on every rank, all at once."""

from __future__ import annotations

import pytest
import torch
from eager_stage import EagerStage
from runner_cases import schedule
from setup_cases import (
    problems_of_different_options,
    problems_of_mismatched_ranks,
    problems_of_other_collectives,
    train_after_a_refusal,
)
from toy_pipeline import ACTIVATION, eager_stages

from gt_pipeline.errors import RunnerSetupError
from gt_pipeline.runner import ActivationSignature, GraphPPRunner
from gt_pipeline.schedules import schedule_of
from gt_trace.testing import GlooWorkers


def test_every_rank_hears_that_two_neighbours_disagree(four: GlooWorkers) -> None:
    (problems,) = set(four.run(problems_of_mismatched_ranks))
    assert problems == ("stage 0 returns (float32[2, 5, 16]), stage 1 takes (float32[2, 5, 17])",)


def test_every_rank_hears_what_others_found_and_what_differs(four: GlooWorkers) -> None:
    (problems,) = set(four.run(problems_of_different_options))
    assert problems == (
        "rank 2: stages [] were given, the schedule has [2] here",
        (
            "loss_reduction must be the same on all ranks of a pipeline: "
            "ranks [0, 1, 2] have mean; ranks [3] have sum"
        ),
    )


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_every_rank_hears_that_holders_of_a_stage_would_run_other_collectives(
    four: GlooWorkers, in_evaluation: bool
) -> None:
    (problems,) = set(four.run(problems_of_other_collectives, in_evaluation))
    assert problems == (
        (
            "ranks 2 and 3 hold stage 1, and would wait for each other's collectives forever; the "
            "first that differs is number 0 of REDUCE_GRAD: rank 2 launches reduce a; rank 3 "
            "launches reduce b"
        ),
    )


def test_a_right_runner_works_after_a_refused_one(four: GlooWorkers) -> None:
    assert four.run(train_after_a_refusal) == [0, 0, 0, 8]


def test_refuses_fewer_gathered_bytes_than_a_stage_has() -> None:
    planned = schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=8)
    (stage,) = eager_stages(planned, 0)
    stage.unsharded_bytes = 1500  # type: ignore[attr-defined]
    with pytest.raises(RunnerSetupError) as caught:
        GraphPPRunner([stage], planned, max_unsharded_bytes=1499)
    assert caught.value.problems == (
        (
            "rank 0: max_unsharded_bytes is 1499: an action needs 1,500 bytes of gathered "
            "parameters, of stage 0"
        ),
    )
    GraphPPRunner([stage], planned, max_unsharded_bytes=1500).close()


def test_refuses_everything_that_is_wrong_with_stages_at_once() -> None:
    planned = schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=8)
    (stage,) = eager_stages(planned, 0)
    stage.num_stages = 2
    stage.input_signature = (ACTIVATION,)
    stage.output_signature = (
        ActivationSignature(shape=(1,), dtype=torch.float32, requires_grad=False),
        ACTIVATION,
    )
    with pytest.raises(RunnerSetupError) as caught:
        GraphPPRunner([stage], planned)
    assert str(caught.value) == "\n".join(
        [
            "this pipeline cannot run:",
            "  - rank 0: stage 0: it is one of 2 stages, the schedule has 1",
            (
                "  - rank 0: stage 0: the first stage takes arguments, no activations, "
                "but has a signature"
            ),
            (
                "  - rank 0: stage 0: the last stage must return the loss first, of shape () and "
                "with a gradient; its signature is (float32[1] without gradient, float32[2, 5, 16])"
            ),
            (
                "  - rank 0: stage 0: only the loss can have a gradient: "
                "(float32[1] without gradient, float32[2, 5, 16])"
            ),
        ]
    )


def test_a_pipeline_of_many_ranks_needs_a_process_group() -> None:
    stages: list[EagerStage] = []
    with pytest.raises(RunnerSetupError, match="the schedule is for 4 ranks, and there is no proc"):
        GraphPPRunner(stages, schedule("1F1B"))
