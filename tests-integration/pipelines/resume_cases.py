"""Pipelines that are saved, and resumed under other degrees; the state of a run as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from pipelines.cases import (
    PipelineCase,
)
from torch.distributed.tensor import DTensor

from gt_trainer.trainer import GraphTrainer

KEPT = {"enable": True, "interval": 1, "last_save_model_only": False, "async_mode": "disabled"}
"""Checkpoints of every step, from which a run can be resumed."""


def resumed_state(case: PipelineCase, other: Mapping[str, int], folder: str) -> tuple[str, ...]:
    """Train, save, and load under other parallel degrees; what differs between the two states."""
    saved = case.trainer("aot_fx_trace", folder, **KEPT)
    saved.config.training.steps = 2
    saved.train()
    before = digests(saved)
    saved.close()
    resumed = case.trainer("aot_fx_trace", folder, degrees=other, **KEPT)
    resumed.checkpointer.load(step=2)
    differences = different_digests(before, digests(resumed))
    step = resumed.step
    resumed.config.training.steps = 3
    resumed.train()  # and it goes on
    finished = resumed.step
    resumed.close()
    if not before:
        differences.append("nothing was saved")
    if (step, finished) != (2, 3):
        differences.append(f"resumed at step {step}, and ended at {finished}")
    return tuple(differences)


def different_digests(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each value that is not the same in both."""
    return [
        f"{name}: {before.get(name)} and {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def digests(
    trainer: GraphTrainer,
    *,
    with_optimizer: bool = True,
    called: Callable[[str], str] = lambda name: name,
) -> dict[str, str]:
    """Of every parameter and its optimizer state, whole, wherever they are; the same on all ranks.

    Where ranks have other values for a name, the digest says so.
    """
    found: list[tuple[str, str]] = []
    for part, optimizer in zip(trainer.model_parts, trainer.optimizers, strict=True):
        for own, parameter in part.named_parameters():
            name = called(own)
            found.append((name, digest(parameter)))
            if with_optimizer:
                state = optimizer.state[parameter]
                found += [(f"{name}.{key}", digest(state[key])) for key in sorted(state)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    of_all: dict[str, str] = {}
    for name, value in (pair for each in everywhere for pair in each):
        if of_all.setdefault(name, value) != value:
            of_all[name] += f", elsewhere {value}"
    return of_all


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()[:16]
