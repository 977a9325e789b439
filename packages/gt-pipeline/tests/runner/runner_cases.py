"""What each rank does in the tests of the runner; workers import it by name."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from toy_pipeline import NUM_MICROBATCHES, batch, eager_stages, gradients_of

from gt_pipeline.runner import GraphPPRunner
from gt_pipeline.schedules import Schedule, schedule_of


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
