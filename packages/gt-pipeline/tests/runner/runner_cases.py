"""What each rank does in the tests of the runner; workers import it by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_pipeline import (
    HIDDEN,
    MICROBATCH_SIZE,
    NUM_MICROBATCHES,
    VOCABULARY,
    batch,
    eager_stages,
    gradients_of,
    loss_fn,
    toy,
)

from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import GraphPPRunner, MicrobatchInputs, StepRecord
from gt_pipeline.schedules import Schedule, schedule_of
from gt_pipeline.split import SharedGroup


def schedule(name: str, num_ranks: int = 4, num_microbatches: int = NUM_MICROBATCHES) -> Schedule:
    """With two stages a rank where the schedule can have more than one."""
    per_rank = 1 if name in ("GPipe", "1F1B") else 2
    return schedule_of(
        name,
        num_ranks=num_ranks,
        num_stages=per_rank * num_ranks,
        num_microbatches=num_microbatches,
    )


def graph_stages(
    planned: Schedule, rank: int, *, place: Callable[[nn.Module], object] = lambda module: None
) -> list[GraphPipelineStage]:
    """As `eager_stages`, but captured, of modules that ``place`` has edited."""
    stages: list[GraphPipelineStage] = []
    for stage in eager_stages(planned, rank):
        place(stage.module)
        tokens, target = (each[:MICROBATCH_SIZE] for each in batch())
        is_first, is_last = stage.stage_index == 0, stage.stage_index == planned.num_stages - 1
        inputs = MicrobatchInputs(
            args=(tokens,) if is_first else (), target=target if is_last else None
        )
        stages.append(
            GraphPipelineStage(
                stage.module,
                stage_index=stage.stage_index,
                num_stages=planned.num_stages,
                activations=stage.input_signature,
                inputs=inputs,
                loss_fn=loss_fn if is_last else None,
                # Stages of one rank may overlap.
                fake_mode=stages[0].fake_mode if stages else None,
            )
        )
    return stages


def train_graphs(name: str) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], int]:
    """As `train_and_evaluate` of graph stages, evaluated first; and the peak of live chunks."""
    planned = schedule(name, dist.get_world_size())
    stages = graph_stages(planned, dist.get_rank())
    with GraphPPRunner(stages, planned) as runner:
        tokens, target = batch(0)
        evaluated = list(runner.eval(tokens, target=target).losses)
        runner.step(tokens, target=target)
        runner.record_steps = True
        tokens, target = batch(1)
        result = runner.step(tokens, target=target)
    assert result.record is not None
    gradients = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.parameters().items()
        if parameter.grad is not None
    }
    return evaluated, list(result.losses), gradients, result.record.peak_live


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
