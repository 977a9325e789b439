"""Which form of a training step a configuration asks for: the one place that branches by mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims

from gt_trace import InputPreparer
from gt_trainer.artifacts.run_artifacts import RunArtifacts, artifact_folder
from gt_trainer.artifacts.run_identity import RunSettings, definitions
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.launcher import RunStoppedError
from gt_trainer.startup import StartupClock
from gt_trainer.steps.layer_summary import layer_summary
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.program import tracing_options
from gt_trainer.steps.program_step import (
    CapturedTrainingStep,
    CaptureSetup,
    JointStep,
    ModelStep,
    ReduceOnceStep,
)
from gt_trainer.steps.recipe import Recipe, ReshardChoice
from gt_trainer.steps.second_groups import create_second_groups
from gt_trainer.steps.training_step import (
    BatchPreparation,
    EagerStep,
    ForwardBackward,
    LossFunction,
    StepReport,
    TrainingStep,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The objects of a trainer of which a step is made."""

    options: TrainerCompileConfig
    model_parts: Sequence[nn.Module]
    """Parallelized: the model, or the stages of this rank."""

    loss_fn: LossFunction
    run_eagerly: ForwardBackward
    schedule: Any | None
    """The pipeline's schedule; None without one."""

    preparation: BatchPreparation
    parallel_dims: ParallelDims
    settings: RunSettings
    """The facts that identify the graphs of the run."""

    device: torch.device
    reshard_after_forward: ReshardChoice
    dump_folder: Path
    clock: StartupClock
    on_capture: Callable[[StepReport], None]
    input_preparers: Sequence[InputPreparer] = ()
    """Hooks on the inputs of captured steps."""


class UnpreparedInputsError(RunStoppedError):
    """A trainer has input preparers, and its options capture nothing."""


def new_training_step(parts: StepParts) -> TrainingStep:
    """The step that ``parts.options`` ask for; nothing is captured before its first run.

    Raises:
        UnpreparedInputsError: there are input preparers, and nothing is captured.
    """
    options = parts.options
    is_eager = options.mode == "none" and not isinstance(parts.schedule, PipelinedStep)
    if parts.input_preparers and is_eager:
        raise UnpreparedInputsError(
            "input preparers change the inputs of captured steps, and --compile.mode none captures "
            "nothing: return none from input_preparers() then, or choose another mode"
        )
    if is_eager:
        return EagerStep(parts.run_eagerly)
    setup = CaptureSetup(
        clock=parts.clock,
        on_capture=parts.on_capture,
        on_shape_change=options.on_shape_change,
        tracing=tracing_options(options, input_preparers=parts.input_preparers),
        artifacts=_artifacts(parts, _second_groups(parts)),
    )
    if isinstance(parts.schedule, PipelinedStep):
        parts.schedule.attach(run=parts.run_eagerly, setup=setup)
        return parts.schedule
    (model,) = parts.model_parts
    form: type[ModelStep[Any]] = CapturedTrainingStep
    if options.mode == "aot_joint":
        form = JointStep
    elif options.accumulation == "reduce_once":
        form = ReduceOnceStep
    return form(
        model,
        parts.loss_fn,
        recipe=Recipe(
            options=options,
            reshard_after_forward=parts.reshard_after_forward,
            debug_folder=parts.dump_folder / "graph_passes" / f"rank_{dist.get_rank()}",
            summarize=layer_summary if dist.get_rank() == 0 else None,  # its captures are recorded
        ),
        preparation=parts.preparation,
        setup=setup,
    )


def _second_groups(parts: StepParts) -> dict[str, dist.ProcessGroup]:
    return create_second_groups(parts.options, parts.parallel_dims, parts.model_parts)


def _artifacts(
    parts: StepParts, second_groups: Mapping[str, dist.ProcessGroup]
) -> RunArtifacts | None:
    folder = artifact_folder(parts.options)
    if folder is None:
        return None
    for part in parts.model_parts:
        # Now, and not at the first step: until then somebody may have edited what runs.
        definitions(part, parts.loss_fn)
    return RunArtifacts(
        folder=folder,
        settings=parts.settings,
        parallel_dims=parts.parallel_dims,
        second_groups=second_groups,
        device=parts.device,
    )
