"""What the workers of ``test_setup_checks.py`` run."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist
from runner_cases import schedule
from toy_pipeline import ACTIVATION, batch, eager_stages

from gt_pipeline.errors import PipelineStepError, RunnerSetupError
from gt_pipeline.runner import GraphPPRunner


def problems_of_mismatched_ranks() -> tuple[str, ...]:
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


def problems_of_different_options() -> tuple[str, ...]:
    """Rank 3 sums losses, and rank 2 has a stage too few."""
    planned = schedule("1F1B")
    rank = dist.get_rank()
    stages = [] if rank == 2 else eager_stages(planned, rank)
    try:
        GraphPPRunner(stages, planned, loss_reduction="sum" if rank == 3 else "mean")
    except RunnerSetupError as error:
        return error.problems
    raise AssertionError("nothing was found")


def problems_of_other_collectives(in_evaluation: bool) -> tuple[str, ...]:
    """Of two pipelines, in which ranks 2 and 3 hold stage 1, and launch in another order."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    planned = schedule("1F1B", num_ranks=2)
    (stage,) = eager_stages(planned, rank // 2)
    order = ("a", "b") if rank < 3 else ("b", "a")
    lines = {"FORWARD": ("gather",), "REDUCE_GRAD": tuple(f"reduce {each}" for each in order)}
    stage.collectives = lambda: lines  # type: ignore[attr-defined]
    stage.prepare_overlap = lambda *_: None  # type: ignore[attr-defined]
    stage.prepare_evaluation = lambda: None  # type: ignore[attr-defined]
    if in_evaluation:

        def prepare() -> None:
            stage.collectives = lambda: lines  # type: ignore[attr-defined]

        stage.prepare_evaluation = prepare  # type: ignore[attr-defined]
        stage.collectives = dict  # type: ignore[attr-defined]
    try:
        with GraphPPRunner([stage], planned, group=pipelines[rank % 2]) as runner:
            tokens, target = batch()
            runner.eval(tokens, target=target)
    except RunnerSetupError as error:
        return error.problems
    except PipelineStepError as error:
        return getattr(error.__cause__, "problems", (str(error),))
    raise AssertionError("nothing was found")


def train_after_a_refusal() -> int:
    """What was refused leaves nothing behind that a right runner would stumble over."""
    planned = schedule("1F1B")
    with pytest.raises(RunnerSetupError):
        GraphPPRunner([], planned)
    tokens, target = batch()
    with GraphPPRunner(eager_stages(planned, dist.get_rank()), planned) as runner:
        return len(runner.step(tokens, target=target).losses)
