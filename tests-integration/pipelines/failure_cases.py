"""What the workers of ``test_pipelines_that_fail.py`` run: a step in which one rank goes wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pipelines.batches import (
    set_weights,
    taken_gradients,
)
from pipelines.cases import (
    PipelineCase,
    step_losses,
)

from gt_config.node_keys import PipelineAction
from gt_pipeline.errors import PipelineStepError
from gt_trainer.steps.step_check import NonFiniteGradientsError, NonFiniteLossError
from gt_trainer.trainer import GraphTrainer

Results = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank's step ended."""

    text: str
    """Of the error; empty if there was none."""

    seconds: float
    """From the beginning of the step."""

    num_gradients: int
    """That parameters have afterwards."""

    losses_afterwards: tuple[float, ...]
    """Of another trainer of the same processes."""


class OnPurposeError(Exception):
    """What a stage raises here."""


def fail_in(case: PipelineCase, folder: str, rank: int, action: PipelineAction) -> Ended:
    """On one rank, the second run of an action's graph raises."""

    def fail(run: Callable[[list[Any]], Results], inputs: list[Any]) -> Results:
        raise OnPurposeError("on purpose")

    def step(trainer: GraphTrainer) -> None:
        step_losses(trainer, 1)

    return _ended(case, folder, rank, action, fail, step)


def poison_in(case: PipelineCase, folder: str, rank: int, action: PipelineAction) -> Ended:
    """On one rank, the second run of an action's graph gives what is not a number."""

    def poison(run: Callable[[list[Any]], Results], inputs: list[Any]) -> Results:
        first, *others = run(inputs)
        return [first * math.nan, *others]

    def step(trainer: GraphTrainer) -> None:
        trainer.config.training.steps = 2
        trainer.train()

    return _ended(case, folder, rank, action, poison, step)


def _ended(
    case: PipelineCase,
    folder: str,
    rank: int,
    action: PipelineAction,
    instead: Callable[[Callable[[list[Any]], Results], list[Any]], Results],
    step: Callable[[GraphTrainer], None],
) -> Ended:
    trainer = case.trainer("aot_fx_trace", folder)
    for part in trainer.model_parts:
        set_weights(part)
    step_losses(trainer, 0)  # it captures
    taken_gradients(trainer.model_parts)
    if dist.get_rank() == rank:
        (stage,) = trainer.pp_schedule.stages.values()
        executable = stage._executables[action]
        own, calls = executable.run, iter(range(case.num_microbatches * 10))
        executable.run = lambda inputs: instead(own, inputs) if next(calls) == 1 else own(inputs)
    dist.barrier()
    begin, text = time.monotonic(), ""
    try:
        step(trainer)
    except (PipelineStepError, NonFiniteGradientsError, NonFiniteLossError) as error:
        text = str(error)
    seconds = time.monotonic() - begin
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    num_gradients = sum(p.grad is not None for p in parameters)
    trainer.close()
    another = case.trainer("aot_fx_trace", f"{folder}/another")
    losses = tuple(loss.item() for loss in step_losses(another, 1))
    another.close()
    return Ended(text=text, seconds=seconds, num_gradients=num_gradients, losses_afterwards=losses)
