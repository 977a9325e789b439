"""Captures as one rank of a run, in a process that is that rank of a fake group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils as titan_utils

from gt_config import Fingerprint
from gt_pipeline.schedules import Schedule
from gt_trainer.artifacts.run_artifacts import RunArtifacts, artifact_folder
from gt_trainer.artifacts.run_identity import Machine, RunSettings, topology_of_run
from gt_trainer.artifacts.storable_graph import StoredGraph
from gt_trainer.dry_run.captured_dry_step import step_program
from gt_trainer.dry_run.fake_pipeline import place_fake_stages, planned_pipeline
from gt_trainer.dry_run.fake_step import FakeStep, fake_ranks, fake_step, meta_model
from gt_trainer.placement.planned_loss import loss_of
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_joint import joint_program
from gt_trainer.steps.program import ProgramToCapture, StoredProgram, tracing_options
from gt_trainer.steps.recipe import Recipe
from gt_trainer.steps.second_groups import create_second_groups
from gt_trainer.trainer import GraphTrainer, input_preparers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCapture:
    """The capture of one rank, as data that a child process can return."""

    identity: Fingerprint
    kind: str
    stored: StoredGraph
    coordinates: Mapping[str, int]


def capture_as_rank(
    config: GraphTrainer.Config, world_size: int, rank: int, stage: int | None
) -> RankCapture:
    """Capture as ``rank``, in a process without a group.

    Args:
        config: a finished configuration that ``preflight`` accepts.
        world_size: number of ranks.
        rank: which of them this process becomes.
        stage: of a pipeline; None without one.

    Raises:
        ArtifactError: what was captured holds something that cannot be stored.
        Exception: whatever placing or capturing raises, as in a real run.
    """
    with parts_to_capture(config, world_size, rank=rank, stage=stage) as parts:
        return _captured(parts.artifacts, parts.programs[stage])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsToCapture:
    """The placed parts of a model, as programs to capture, and the store of their graphs."""

    artifacts: RunArtifacts
    programs: Mapping[int | None, StoredProgram[Any]]
    """Program of each stage of a pipeline; of the whole model, under None, without one."""

    schedule: Schedule | None
    """The schedule of the pipeline."""


@contextmanager
def parts_to_capture(
    config: GraphTrainer.Config, world_size: int, *, rank: int = 0, stage: int | None = None
) -> Iterator[PartsToCapture]:
    """Place the parts that ``rank`` captures, in a process without a group.

    The fake ranks exist while the context lasts.

    Args:
        config: as for ``capture_as_rank``.
        world_size: as for ``capture_as_rank``.
        rank: as for ``capture_as_rank``.
        stage: of a pipeline; None for all of them, whose plans are published then.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        with fake_step(config, world_size, rank=rank) as step:
            artifacts = artifacts_of(config, step.parallel_dims, [step.model])
            whole = _whole_program(config, step, artifacts)
            yield PartsToCapture(artifacts=artifacts, programs={None: whole}, schedule=None)
        return
    with fake_ranks(world_size, rank=rank):
        built = meta_model(config, world_size)
        plan = planned_pipeline(config)
        indices = range(plan.schedule.num_stages) if stage is None else [stage]
        # Plans are those of a file where one stage is captured.
        placed = place_fake_stages(config, built, plan, indices, publishes_plans=stage is None)
        artifacts = artifacts_of(config, built.parallel_dims, list(placed.parts.values()))
        yield PartsToCapture(
            artifacts=artifacts,
            programs={
                index: StoredProgram(
                    asked=placed.step.program(index, part, placed.microbatch),
                    recipe=placed.step.recipe_of(index),
                    axes=artifacts.axes(part),
                    clock=StartupClock(),
                )
                for index, part in placed.parts.items()
            },
            schedule=plan.schedule,
        )


def artifacts_of(
    config: GraphTrainer.Config, parallel_dims: ParallelDims, parts: Sequence[nn.Module]
) -> RunArtifacts:
    """Return the store from which a run's steps would load their graphs.

    Args:
        config: of the run, with a folder for artifacts.
        parallel_dims: of the fake group.
        parts: the placed model, or stages of it.
    """
    folder = artifact_folder(config.compile)
    assert folder is not None
    assert config.model_spec is not None
    torch.use_deterministic_algorithms(
        config.debug.deterministic, warn_only=config.debug.deterministic_warn_only
    )
    return RunArtifacts(
        folder=folder,
        settings=RunSettings(
            compile=config.compile,
            topology=topology_of_run(parallel_dims, config.training, config.parallelism),
            model=config.model_spec.model,
            loss=loss_of(config),
            parallelism=config.parallelism,
            training=config.training,
            debug=config.debug,
            machine=Machine.here(titan_utils.device_type),
            input_preparers=input_preparers_of(config),
        ),
        parallel_dims=parallel_dims,
        second_groups=create_second_groups(config.compile, parallel_dims, parts),
        device=torch.device("cpu"),
    )


def _whole_program(
    config: GraphTrainer.Config, step: FakeStep, artifacts: RunArtifacts
) -> StoredProgram[Any]:
    options = config.compile
    asked: ProgramToCapture[Any]
    if options.mode == "aot_joint":
        tokens, _, _, extra = step.inputs
        tracing = tracing_options(
            options, input_preparers=input_preparers_of(config), meta_device=step.meta_device
        )
        asked = joint_program(step.model, (tokens,), extra, options=tracing)
    else:
        count = artifacts.settings.topology.gradient_accumulation_steps
        asked = step_program(config, step, num_microbatches=count)
    return StoredProgram(
        asked=asked,
        recipe=Recipe(
            options=options,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        ),
        axes=artifacts.axes(step.model),
        clock=StartupClock(),
    )


def _captured(artifacts: RunArtifacts, graph: StoredProgram[Any]) -> RankCapture:
    identity = artifacts.identity(graph)  # taken before the capture, as in a run
    stored = graph.encode(graph.capture())
    return RankCapture(
        identity=identity,
        kind=graph.kind,
        stored=StoredGraph(
            step=json.loads(json.dumps(stored.step)),
            documents=dict(stored.documents),
            blobs=dict(stored.blobs),
        ),
        coordinates=dict(graph.axes.coordinates),
    )
