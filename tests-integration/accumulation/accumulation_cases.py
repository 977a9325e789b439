"""What the workers of ``test_reduce_once.py`` run: microbatches that reduce once, and a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from pipelines.cases import (
    new_loss,
    new_model,
    num_tokens,
    reduced_as,
    set_weights,
    taken_gradients,
)
from training_cases import Case, RecordingTrainer, close, differing, local, same, trainer_of

from gt_trace import collective_counts

NUM_STEPS = 2
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
