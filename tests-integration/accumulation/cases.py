"""What the workers of ``test_reduce_once.py`` run: microbatches that reduce once, and a reference."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from imitated_devices import imitated_recordings
from pipelines.batches import (
    new_loss,
    new_model,
    num_tokens,
    reduced_as,
    set_weights,
    taken_gradients,
)
from training_cases import Case, RecordingTrainer, close, differing, local, same, trainer_of

from gt_trace import collective_counts
from gt_trainer.metrics.metrics_history import read_metrics
from gt_trainer.steps.program_step import UnlikeMicrobatchesError
from gt_trainer.steps.step_check import NonFiniteGradientsError
from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 2
NUM_TRAINED = 4
REDUCE_ONCE: Mapping[str, Any] = MappingProxyType({"accumulation": "reduce_once"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank saw."""

    differences: tuple[str, ...]
    num_gradients: int
    losses: tuple[float, ...]
    collectives: tuple[Mapping[str, int], ...]
    """Of each graph, in the order in which they run."""


def compare_with_one_reduction(
    case: Case, folder: str, options: Mapping[str, Any] = MappingProxyType({})
) -> Found:
    """The same microbatches captured, and by a whole model whose sums are reduced afterwards."""
    with imitated_recordings() as recorders:
        found = _compare(case, folder, options)
        is_recorded = bool(options.get("cuda_graphs"))
        assert [each.num_replays for each in recorders] == [NUM_STEPS - 1] * is_recorded
    return found


def _compare(case: Case, folder: str, options: Mapping[str, Any]) -> Found:
    trainer = trainer_of(case, "aot_fx_trace", folder, options={**REDUCE_ONCE, **options})
    (model,) = trainer.model_parts
    set_weights(model)
    whole = new_model(trainer, lambda model: model)
    loss_fn = new_loss(trainer, whole)
    differences: list[str] = []
    losses: list[float] = []
    num_gradients = 0
    for step in range(NUM_STEPS):
        batches = list(_batches(trainer, case, step))
        loss = trainer.forward_backward_step(
            input_dict=[inputs for inputs, _ in batches],
            labels=[labels for _, labels in batches],
            global_valid_tokens=num_tokens(),
        )
        expected = []
        for batch in batches:
            inputs, labels, kwargs = trainer.post_dataloading_process(*batch)
            value, _ = loss_fn(whole(inputs, **kwargs), labels, num_tokens())
            value.backward()
            expected.append(local(value))
        gradients = taken_gradients([model])
        reference = taken_gradients([whole], whole=True)
        like = dict(model.named_parameters())
        reduced = reduced_as(like, reference, trainer)
        differences += differing(gradients, reduced, f"step {step}: gradient")
        if not same(local(loss).reshape(()), sum(expected).reshape(())):
            differences.append(f"step {step}: loss {loss} and {sum(expected)}")
        buffers = {name: local(each) for name, each in model.named_buffers()}
        differences += differing(
            buffers, {n: local(b) for n, b in whole.named_buffers()}, f"step {step}: buffer"
        )
        losses.append(local(loss).item())
        num_gradients += len(gradients)
    (report,) = trainer.training_step.reports
    collectives = tuple(dict(collective_counts(each)) for each in report.graph_modules)
    close(trainer)
    return Found(
        differences=tuple(differences),
        num_gradients=num_gradients,
        losses=tuple(losses),
        collectives=collectives,
    )


def _batches(trainer: RecordingTrainer, case: Case, step: int) -> Iterator[tuple[Any, Any]]:
    """Of this data rank, as a data loader gives them."""
    data = trainer.parallel_dims.get_optional_mesh("batch")
    data_rank = 0 if data is None else data.get_local_rank()
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    for _ in range(trainer.gradient_accumulation_steps):
        shape = (case.batch_size, case.seq_len)
        tokens = torch.randint(2048, shape, generator=generator)
        positions = torch.arange(case.seq_len).repeat(case.batch_size, 1)
        positions[:, case.seq_len // 3 :] -= case.seq_len // 3
        labels = tokens.roll(-1, dims=1)
        labels[:, ::5] = -100
        yield {"input": tokens, "positions": positions}, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What rank 0 wrote down of a run, in whole numbers of steps; empty elsewhere."""

    losses: tuple[tuple[int, float, float], ...]
    """Step, loss and norm of the gradients."""

    validation: str


def trained(
    case: Case,
    accumulation: str,
    num_steps: int,
    folder: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Trained:
    """Train with validation up to a step, from the newest checkpoint in the folder if there is one."""
    options = {**options, "accumulation": accumulation}
    config = case.build(
        "aot_fx_trace", folder, options=options, enable=True, interval=2, last_save_model_only=False
    )
    config.training.steps = num_steps
    config.lr_scheduler.total_steps = NUM_TRAINED
    config.validator = dataclasses.replace(config.validator, enable=True, freq=2, steps=2)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    trainer = GraphTrainer(config)
    trainer.train()
    trainer.close()
    gc.collect()
    dist.barrier()
    if dist.get_rank() != 0:
        return Trained(losses=(), validation="")
    return Trained(
        losses=tuple(
            (record["step"], record["loss"], record["grad_norm"])
            for record in read_metrics(Path(folder, "metrics.jsonl"))
        ),
        validation=Path(folder, "validation.jsonl").read_text(),
    )


def error_of_bad_gradients(case: Case, folder: str) -> tuple[str, bool]:
    """Train with a weight that is not a number.

    Returns:
        The error, and whether an update was made.
    """
    trainer = trainer_of(case, "aot_fx_trace", folder, options=REDUCE_ONCE)
    before = trainer.parameters()
    with torch.no_grad():
        trainer.model_parts[0].norm.weight.to_local().fill_(float("nan"))
    try:
        trainer.take_step()
    except NonFiniteGradientsError as error:
        message = str(error)
    else:
        message = "no error"
    del before["norm.weight"]
    after = trainer.parameters()
    has_changed = any(not same(value, after[name]) for name, value in before.items())
    close(trainer)
    return message, has_changed


def error_of_unlike_microbatches(case: Case, folder: str) -> str:
    """What a step says whose microbatches have two lengths."""
    trainer = trainer_of(case, "aot_fx_trace", folder, options=REDUCE_ONCE)
    batches = list(_batches(trainer, case, 0))
    half = case.seq_len // 2
    inputs, labels = batches[-1]
    batches[-1] = {name: each[:, :half] for name, each in inputs.items()}, labels[:, :half]
    try:
        trainer.forward_backward_step(
            input_dict=[inputs for inputs, _ in batches],
            labels=[labels for _, labels in batches],
            global_valid_tokens=num_tokens(),
        )
    except UnlikeMicrobatchesError as error:
        return str(error)
    finally:
        close(trainer)
    return "no error"
