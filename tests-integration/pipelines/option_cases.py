"""What the workers of ``test_pipelined_options.py`` run: pipelines with an option of ``--compile``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from imitated_devices import imitated_recordings, symmetric_memory_of_cpus
from pipelines.batches import (
    microbatches,
    new_loss,
    new_model,
    set_weights,
    unequal,
)
from pipelines.cases import (
    Found,
    PipelineCase,
    compare_pipelines,
    evaluate,
    step_losses,
    whole_batch,
)

from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import GraphPPRunner
from gt_trainer.metrics.metrics_history import read_metrics
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, kw_only=True)
class OptionCase(PipelineCase):
    """A pipeline with further options, also of ``--parallelism``; remembers its last trainer."""

    parallelism: Mapping[str, Any] = field(default_factory=dict)

    def build(self, mode: str, folder: str, **checkpoint: Any) -> GraphTrainer.Config:
        config = PipelineCase.build(self, mode, folder, **checkpoint)
        config.parallelism = replace(config.parallelism, **self.parallelism)
        return config

    def trainer(self, mode: str, folder: str, **checkpoint: Any) -> GraphTrainer:
        _last[:] = [PipelineCase.trainer(self, mode, folder, **checkpoint)]
        return _last[0]


_last: list[GraphTrainer] = []


def compare_and_count(case: OptionCase, folder: str) -> tuple[Found, Counter[str]]:
    """``compare_pipelines``, and what passes did on all graphs of this rank."""
    found = compare_pipelines(case, folder)
    return found, _counts(_last.pop())


def compare_and_count_launches(
    case: OptionCase, folder: str, whole: bool
) -> tuple[Found, list[int], int]:
    """``compare_pipelines`` by imitated recordings, of ``whole`` steps or of actions.

    Returns:
        What was found, launches by batch, and how many actions of a rank compute.
    """
    launches: list[int] = []
    step_microbatches = GraphPPRunner.step_microbatches

    def counted(runner: GraphPPRunner, microbatches: Any) -> Any:
        before = sum(each.num_replays for each in recorders)
        result = step_microbatches(runner, microbatches)
        launches.append(sum(each.num_replays for each in recorders) - before)
        return result

    with (
        imitated_recordings() as recorders,
        mock.patch.object(GraphPPRunner, "step_microbatches", counted),
        contextlib.ExitStack() as only_actions,
    ):
        if not whole:
            none = mock.patch.object(GraphPipelineStage, "step_replayer", return_value=None)
            only_actions.enter_context(none)
        found = compare_pipelines(case, folder)
    schedule = _last.pop().pp_schedule._schedule
    rank = dist.get_rank() // (dist.get_world_size() // 2)
    return found, launches, len(schedule.compute[rank])


def evaluated_at_half_the_length(case: OptionCase, folder: str) -> tuple[list[str], int]:
    """After training, losses of half as long samples, beside those of the whole model.

    Returns:
        What differs, on ranks of the last stage, and how many stages were captured.
    """
    trainer = case.trainer("aot_fx_trace", folder)
    for part in trainer.model_parts:
        set_weights(part)
    step_losses(trainer, 0)
    trainer.config.training.seq_len //= 2
    found = evaluate(trainer, microbatches(trainer, 1))
    whole = new_model(trainer, lambda model: model)
    expected, _, _ = whole_batch(trainer, whole, new_loss(trainer, whole), 1)
    trainer.config.training.seq_len *= 2
    step_losses(trainer, 0)
    num_captured = len(trainer.training_step.reports)
    is_last = trainer.pp_has_last_stage
    trainer.close()
    return list(unequal("evaluation", found, expected)) if is_last else [], num_captured


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a rank saw of two steps."""

    losses: tuple[float, ...]
    """Of metrics.jsonl; on rank 0."""

    counts: Counter[str]
    """What passes did on all graphs of this rank, as ``pass: count``."""


def trained(case: PipelineCase, folder: str) -> Trained:
    """Train for two steps."""
    trainer = case.trainer("aot_fx_trace", folder)
    trainer.config.training.steps = 2
    trainer.train()
    counts = _counts(trainer)
    trainer.close()
    dist.barrier()
    records = read_metrics(Path(folder, "metrics.jsonl")) if dist.get_rank() == 0 else []
    return Trained(losses=tuple(record["loss"] for record in records), counts=counts)


def trained_with_symmetric_memory(case: PipelineCase, folder: str) -> Trained:
    """The same where every group has symmetric memory, and its operators are what they mean."""
    with symmetric_memory_of_cpus():
        return trained(case, folder)


def _counts(trainer: GraphTrainer) -> Counter[str]:
    found: Counter[str] = Counter()
    for report in trainer.training_step.reports:
        for passes in report.passes:
            for record in passes.records:
                for name, count in record.report.counts.items():
                    found[f"{record.name}: {name}"] += count
    return found
