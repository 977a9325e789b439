"""What workers run to validate a model that a solver placed, and the same model placed by hand."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_cases import Case, local

from gt_config import AutoParallelConfig
from gt_trainer.trainer import GraphTrainer

STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """What a rank saw of two trained steps, with a validation after each."""

    losses: tuple[float, ...]
    """Of the validations, from the history that rank 0 writes; empty elsewhere."""

    trained_losses: tuple[float, ...]
    counted_tokens: float
    """By the layers' experts since the last update, after a validation."""


def validated(case: Case, solver: AutoParallelConfig | None, folder: str) -> Validated:
    """Train two steps and validate after each; by hand if there is no solver."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    options: dict[str, Any] = {}
    if solver is not None:
        options = {"autoparallel": True, "autoparallel_solver": solver}
    config = case.build("aot_fx_trace", folder, options=options)
    config.training.steps = STEPS
    config.validator = dataclasses.replace(config.validator, enable=True, freq=1, steps=2)
    trainer = GraphTrainer(config)
    trainer.train()
    counts = [
        local(buffer).sum()
        for name, buffer in trainer.model_parts[0].named_buffers()
        if name.endswith("tokens_per_expert_E")
    ]
    trainer.close()
    if rank != "0":
        return Validated(losses=(), trained_losses=(), counted_tokens=float(sum(counts)))
    return Validated(
        losses=_history(Path(folder) / "validation.jsonl", "validation_loss"),
        trained_losses=_history(Path(folder) / "metrics.jsonl", "loss"),
        counted_tokens=float(sum(counts, torch.tensor(0.0))),
    )


def _history(path: Path, what: str) -> tuple[float, ...]:
    return tuple(json.loads(line)[what] for line in path.read_text().splitlines())
