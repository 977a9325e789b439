"""What is wrong with a pipeline is raised when its runner is made, on every rank, all at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from eager_stage import EagerStage
from runner_cases import schedule
from toy_pipeline import ACTIVATION, batch, eager_stages

from gt_pipeline.errors import RunnerSetupError
from gt_pipeline.runner import GraphPPRunner, TensorSignature
from gt_pipeline.schedules import schedule_of
from gt_trace.testing import GlooWorkers


def _problems_of_mismatched_ranks() -> tuple[str, ...]:
    """Rank 1 takes another shape than rank 0 returns."""
    planned = schedule("1F1B")
    (stage,) = eager_stages(planned, dist.get_rank())
    if stage.stage_index == 1:
        stage.input_signature = (dataclasses.replace(ACTIVATION, shape=(2, 5, 17)),)
    try:
        GraphPPRunner([stage], planned)
    except RunnerSetupError as error:
        return error.problems
    raise AssertionError("nothing was found")


def _problems_of_different_options() -> tuple[str, ...]:
    """Rank 3 sums losses, and rank 2 has a stage too few."""
    planned = schedule("1F1B")
    rank = dist.get_rank()
    stages = [] if rank == 2 else eager_stages(planned, rank)
    try:
        GraphPPRunner(stages, planned, loss_reduction="sum" if rank == 3 else "mean")
    except RunnerSetupError as error:
        return error.problems
    raise AssertionError("nothing was found")


def _train_after_a_refusal() -> int:
    """What was refused leaves nothing behind that a right runner would stumble over."""
    planned = schedule("1F1B")
    with pytest.raises(RunnerSetupError):
        GraphPPRunner([], planned)
    tokens, target = batch()
    with GraphPPRunner(eager_stages(planned, dist.get_rank()), planned) as runner:
        return len(runner.step(tokens, target=target).losses)


def test_every_rank_hears_that_two_neighbours_disagree(four: GlooWorkers) -> None:
    (problems,) = set(four.run(_problems_of_mismatched_ranks))
    assert problems == ("stage 0 returns (float32[2, 5, 16]), stage 1 takes (float32[2, 5, 17])",)


def test_every_rank_hears_what_others_found_and_what_differs(four: GlooWorkers) -> None:
    (problems,) = set(four.run(_problems_of_different_options))
    assert problems == (
        "rank 2: stages [] were given, the schedule has [2] here",
        (
            "loss_reduction must be the same on all ranks of a pipeline: "
            "ranks [0, 1, 2] have mean; ranks [3] have sum"
        ),
    )


def test_a_right_runner_works_after_a_refused_one(four: GlooWorkers) -> None:
    assert four.run(_train_after_a_refusal) == [0, 0, 0, 8]


def test_refuses_everything_that_is_wrong_with_stages_at_once() -> None:
    planned = schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=8)
    (stage,) = eager_stages(planned, 0)
    stage.num_stages = 2
    stage.input_signature = (ACTIVATION,)
    stage.output_signature = (
        TensorSignature(shape=(1,), dtype=torch.float32, requires_grad=False),
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
