"""What each rank does in the tests of the runner; workers import it by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_pipeline import (
    HIDDEN,
    NUM_MICROBATCHES,
    VOCABULARY,
    batch,
    eager_stages,
    gradients_of,
    toy,
)

from gt_pipeline.runner import GraphPPRunner, StepRecord
from gt_pipeline.schedules import Schedule, schedule_of
from gt_pipeline.split import SharedGroup


def schedule(name: str, num_ranks: int = 4) -> Schedule:
    """With 8 microbatches, and two stages a rank where the schedule can have more than one."""
    per_rank = 1 if name in ("GPipe", "1F1B") else 2
    return schedule_of(
        name,
        num_ranks=num_ranks,
        num_stages=per_rank * num_ranks,
        num_microbatches=NUM_MICROBATCHES,
    )


def train_and_evaluate(
    name: str, num_steps: int, evaluate_first: bool
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Losses of the first evaluation, of the last step, and this rank's gradients."""
    planned = schedule(name, dist.get_world_size())
    stages = eager_stages(planned, dist.get_rank())
    evaluated: list[Tensor] = []
    trained: list[Tensor] = []
    with GraphPPRunner(stages, planned) as runner:
        if evaluate_first:
            tokens, target = batch(0)
            evaluated = list(runner.eval(tokens, target=target).losses)
        for step in range(num_steps):
            tokens, target = batch(step)
            trained = list(runner.step(tokens, target=target).losses)
    return evaluated, trained, gradients_of([stage.module for stage in stages])


def train_tied(name: str, one_parameter: bool) -> dict[str, Tensor]:
    """Gradients of this rank after one step of a model whose head is its embedding.

    Args:
        name: of the schedule.
        one_parameter: whether a rank with both stages holds one parameter, not two alike.
    """
    planned = schedule(name)
    whole = toy(planned.num_stages, tied=True)
    if not one_parameter:
        assert whole.head is not None
        # Other values than the embedding's, until they are synchronized.
        whole.head.weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN))
    stages = eager_stages(planned, dist.get_rank(), whole=whole)
    tokens, target = batch()
    with GraphPPRunner(stages, planned, shared_groups=[TIED]) as runner:
        runner.synchronize_shared_parameters()
        runner.step(tokens, target=target)
    return gradients_of([stage.module for stage in stages])


def record(name: str) -> StepRecord:
    """What this rank recorded of its second step."""
    planned = schedule(name)
    tokens, target = batch()
    with GraphPPRunner(eager_stages(planned, dist.get_rank()), planned) as runner:
        runner.step(tokens, target=target)
        runner.record_steps = True
        recorded = runner.step(tokens, target=target).record
    assert recorded is not None
    return recorded


TIED = SharedGroup(("embedding.weight", "head.weight"))
