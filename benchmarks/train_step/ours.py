"""Graph Trainer as contestant: a module of configurations for ``gt-train --module``.

It is started by the command that users type; only ``train`` differs, which obeys the measuring
process instead of counting steps.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from types import MappingProxyType

from gt_trainer.trainer import GraphTrainer
from train_step.commands import CommandedTraining
from train_step.workloads import WORKLOADS, Workload, shared_settings

__all__ = ["deepseek_v3", "llama3"]


class CommandedGraphTrainer(CommandedTraining, GraphTrainer):
    """Our trainer, stepping on command."""

    timed_functions = MappingProxyType(
        {
            "clip": "gt_trainer.trainer:clip_gradients",
            "optimizer": "gt_trainer.trainer:update_parameters",
        }
    )

    @dataclass(kw_only=True, slots=True)
    class Config(GraphTrainer.Config):
        """No options of its own."""


def llama3() -> CommandedGraphTrainer.Config:
    return _configuration(WORKLOADS["llama3"])


def deepseek_v3() -> CommandedGraphTrainer.Config:
    return _configuration(WORKLOADS["deepseek_v3"])


def _configuration(workload: Workload) -> CommandedGraphTrainer.Config:
    module = importlib.import_module(f"gt_trainer.models.{workload.module}")
    debug: GraphTrainer.Config = getattr(module, workload.config)()
    fields = {field.name: getattr(debug, field.name) for field in dataclasses.fields(debug)}
    return CommandedGraphTrainer.Config(**fields | shared_settings(workload))
