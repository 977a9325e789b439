"""What the workers of ``test_pipelines_that_fail.py`` run: a step in which one rank goes wrong."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
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
from gt_trace.gloo import use_one_gloo_thread
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


def die_in(
    case: PipelineCase, folder: str, dying: int, action: PipelineAction, rank: int, store: str
) -> None:
    """One process of four: that of ``dying`` is killed in the second run of an action's graph.

    The others write how their step ended to a file of their rank.
    """
    torch.set_num_threads(1)
    use_one_gloo_thread()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 4),  # type: ignore[attr-defined]  # exported at run time
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=600),  # what ends is not to end by it
    )
    trainer = case.trainer("aot_fx_trace", folder)
    for part in trainer.model_parts:
        set_weights(part)
    step_losses(trainer, 0)  # it captures
    taken_gradients(trainer.model_parts)

    def die(run: Callable[[list[Any]], Results], inputs: list[Any]) -> Results:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still here")

    if rank == dying:
        _run_otherwise(trainer, action, die)
    dist.barrier()
    begin, text = time.monotonic(), ""
    try:
        step_losses(trainer, 1)
    except PipelineStepError as error:
        text = str(error)
    ended = Ended(
        text=text,
        seconds=time.monotonic() - begin,
        num_gradients=_num_gradients(trainer),
        losses_afterwards=(),
    )
    Path(folder, f"rank {rank}").write_text(json.dumps(asdict(ended)))
    os._exit(0)  # groups with a dead rank cannot be left in order


def _run_otherwise(
    trainer: GraphTrainer,
    action: PipelineAction,
    instead: Callable[[Callable[[list[Any]], Results], list[Any]], Results],
) -> None:
    """Replace the second run of the graph of an action of this rank's stage."""
    (stage,) = trainer.pp_schedule.stages.values()
    executable = stage._executables.computing[action]
    own, calls = executable.run, itertools.count()
    executable.run = lambda inputs: instead(own, inputs) if next(calls) == 1 else own(inputs)


def _num_gradients(trainer: GraphTrainer) -> int:
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    return sum(p.grad is not None for p in parameters)


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
        _run_otherwise(trainer, action, instead)
    dist.barrier()
    begin, text = time.monotonic(), ""
    try:
        step(trainer)
    except (PipelineStepError, NonFiniteGradientsError, NonFiniteLossError) as error:
        text = str(error)
    seconds = time.monotonic() - begin
    num_gradients = _num_gradients(trainer)
    trainer.close()
    another = case.trainer("aot_fx_trace", f"{folder}/another")
    losses = tuple(loss.item() for loss in step_losses(another, 1))
    another.close()
    return Ended(text=text, seconds=seconds, num_gradients=num_gradients, losses_afterwards=losses)
