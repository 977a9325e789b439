"""Several steps of a schedule before an update: their gradients add up in the parameters."""

from __future__ import annotations

import torch
from pipelines.batches import (
    Gradients,
    new_loss,
    new_model,
    reduced_as,
    set_weights,
    taken_gradients,
    unequal,
)
from pipelines.cases import (
    PipelineCase,
    TorchRuntime,
    plan_of,
    step_losses,
    whole_batch,
)
from training_cases import differing

NUM_STEPS = 3
"""Of the schedule. Of two, sums have one order."""


def compare_accumulated(case: PipelineCase, folder: str) -> tuple[list[str], int, int]:
    """Steps of the schedule without an update, three ways: captured, whole, and PyTorch's runtime.

    Returns:
        What differs, and the numbers of gradients and losses compared on this rank.
    """
    trainer = case.trainer("aot_fx_trace", folder)
    for part in trainer.model_parts:
        set_weights(part)
    whole = new_model(trainer, lambda model: model)
    loss_of_whole = new_loss(trainer, whole)
    runtime = TorchRuntime(trainer, plan_of(trainer), case.overlap)
    like = {n: p for part in trainer.model_parts for n, p in part.named_parameters()}
    of_whole: Gradients = {}
    of_runtime: Gradients = {}
    differences: list[str] = []
    num_losses = 0
    for step in range(NUM_STEPS):
        found = step_losses(trainer, step)
        _, expected, gradients = whole_batch(trainer, whole, loss_of_whole, step)
        torch_losses, torch_gradients = runtime.step(step)
        if trainer.pp_has_last_stage:
            differences += unequal(f"step {step}, whole", found, expected)
            differences += unequal(f"step {step}, runtime", found, torch_losses)
            num_losses += len(found)
        add(of_whole, reduced_as(like, {n: gradients[n] for n in like}, trainer))
        add(of_runtime, reduced_as(like, torch_gradients, trainer))
    accumulated = taken_gradients(trainer.model_parts)
    for title, reference in (("whole", of_whole), ("runtime", of_runtime)):
        differences += differing(accumulated, reference, f"{title}: gradient")
    trainer.close()
    return differences, len(accumulated), num_losses


def add(sums: Gradients, terms: Gradients) -> None:
    for name, term in terms.items():
        sums[name] = torch.add(sums[name], term) if name in sums else term
