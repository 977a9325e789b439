"""Which models are stamped on which meshes, and how one such cell is checked."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from gt_config import CaptureLayers
from gt_passes import DescribeOnly
from gt_trace.stamping import StampReport
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import WholeStepProgram, whole_step
from gt_trainer.steps.program import CaptureReport, TracingOptions, capture_program
from gt_trainer.steps.recipe import Recipe
from gt_trainer.trainer import GraphTrainer

__all__ = [
    "MESHES",
    "MODELS",
    "Cell",
    "cell_of",
    "compared_capture",
    "passed_both_ways",
    "with_layers",
]

MODELS = {
    "llama3": ("llama3", "llama3_debugmodel"),
    "qwen3": ("qwen3", "qwen3_debugmodel"),
    "qwen3-MoE": ("qwen3", "qwen3_moe_debugmodel"),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3_debugmodel"),
}
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "FSDP": (4, {}),
    "FSDP x TP": (4, {"tensor_parallel_degree": 2}),
    "FSDP x EP": (4, {"expert_parallel_degree": 2}),
    "EP on all of FSDP": (4, {"expert_parallel_degree": 4}),
    "FSDP x TP x EP": (8, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
}

WARM_UP_LAYERS = 2
"""One dense, one with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model of some depth on one mesh."""

    module: str
    config: str
    num_layers: int
    world_size: int = 1
    degrees: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``--compile``, beside how layers are captured."""


def cell_of(
    model: str, mesh: str, num_layers: int, options: Mapping[str, Any] = MappingProxyType({})
) -> Cell:
    """The cell of a model of ``MODELS`` on a mesh of ``MESHES``."""
    module, config = MODELS[model]
    world_size, degrees = MESHES[mesh]
    return Cell(
        module=module,
        config=config,
        num_layers=num_layers,
        world_size=world_size,
        degrees=degrees,
        options=dict(options),
    )


def with_layers(config: GraphTrainer.Config, num_layers: int) -> GraphTrainer.Config:
    """``config`` with another depth: the published layers, and then the last again."""
    spec = config.model_spec
    assert spec is not None
    published = spec.model.layers
    spec.model.layers = [
        copy.deepcopy(published[min(index, len(published) - 1)]) for index in range(num_layers)
    ]
    return config


def compared_capture(cell: Cell) -> tuple[StampReport, CaptureReport[WholeStepProgram]]:
    """Capture with the comparison switched on, and run the default passes with the verifier.

    Raises:
        StampingError: the stamped capture differs from the full one.
    """
    report = _captured(cell, "compared")
    assert report.stamping is not None
    return report.stamping, report


def passed_both_ways(
    cell: Cell,
) -> tuple[CaptureReport[WholeStepProgram], CaptureReport[WholeStepProgram]]:
    """Capture by stamping and in full, apart, and run the passes of ``cell.options`` on both.

    The compiler passes only say what they would do: generated code is a function of the graph.
    """
    # DTensor computes some layouts by operators, once in a process, and remembers them: the first
    # trace has dead nodes that no later one has.
    _captured(replace(cell, num_layers=WARM_UP_LAYERS), "full")
    return _captured(cell, "stamped"), _captured(cell, "full")


def _captured(cell: Cell, capture_layers: CaptureLayers) -> CaptureReport[WholeStepProgram]:
    config = getattr(importlib.import_module(f"gt_trainer.models.{cell.module}"), cell.config)()
    with_layers(config, cell.num_layers)
    for name, degree in cell.degrees.items():
        setattr(config.parallelism, name, degree)
    config.compile = replace(config.compile, **cell.options)
    with fake_step(config, cell.world_size) as step:
        return capture_program(
            whole_step(
                step.model,
                step.loss_fn,
                *step.inputs,
                options=TracingOptions(
                    ep_overlap=config.compile.ep_overlap,
                    capture_layers=capture_layers,
                    meta_device=step.meta_device,
                ),
            ),
            recipe=Recipe(
                options=config.compile,
                reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
                compiler=DescribeOnly(),
            ),
            clock=StartupClock(),
        )
