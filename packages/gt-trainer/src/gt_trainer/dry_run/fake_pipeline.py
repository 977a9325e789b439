"""The stages of a pipeline that does not exist, each kind captured once by the code of a real run.

This process is rank 0 of torch's fake process group. Other pipeline ranks hold other stages over
meshes of the same shape, so their stages are placed on this rank's meshes: what a rank computes
depends on its stages alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_passes import DescribeOnly, SubgraphCompiler
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import MicrobatchInputs
from gt_trainer.dry_run.equal_stages import equal_stages
from gt_trainer.dry_run.fake_step import MetaModel, example_inputs
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.pipelines.split_model import captured_plan, captured_stages, placed_stages
from gt_trainer.placement.planned_loss import LossOfParts, loss_of
from gt_trainer.steps.captured_stage import StageProgram
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.program import CaptureReport, tracing_options
from gt_trainer.steps.program_step import CaptureSetup
from gt_trainer.trainer import GraphTrainer, input_preparers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePipeline:
    """All stages of a pipeline, captured."""

    plan: PipelinePlan
    stages: tuple[GraphPipelineStage, ...]
    """For each stage the one that was captured for it; equal stages share one."""

    parallel_dims: ParallelDims
    num_parameters: int
    flops_per_token: int
    reports: tuple[CaptureReport[StageProgram], ...]
    """Of each capture."""

    @property
    def captured(self) -> tuple[GraphPipelineStage, ...]:
        """Each distinct stage once."""
        return tuple(dict.fromkeys(self.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStages:
    """Some stages of a pipeline, placed and in training mode, not captured yet."""

    parts: Mapping[int, nn.Module]
    """By stage index, on meta."""

    step: PipelinedStep
    microbatch: MicrobatchInputs
    """Of zeros, as a run would give it."""


def planned_pipeline(config: GraphTrainer.Config) -> PipelinePlan:
    """The pipeline of captured stages that ``config`` asks for."""
    plan = pipeline_plan(
        config.parallelism,
        num_layers=len(_decoder_config(config).layers),
        local_batch_size=config.training.local_batch_size,
    )
    return captured_plan(plan, config.compile)


def capture_divided(
    config: GraphTrainer.Config,
    built: MetaModel,
    plan: PipelinePlan,
    *,
    publishes_plans: bool = True,
) -> FakePipeline:
    """Cut, place and capture the stages of a model; within ``fake_ranks``.

    Args:
        config: a finished configuration that ``preflight`` accepts; its pipeline degree is 2 or
            more.
        built: the model of ``config``. Not changed.
        plan: which modules each stage has. Of its schedule only the stages count, and what may be
            offloaded for each chunk that it keeps.
        publishes_plans: whether a solver's plans are logged, and written to the dump folder.

    Raises:
        Exception: whatever placing or capturing raises, as in a real run.
    """
    model_config = _decoder_config(config)
    like = equal_stages(plan.names_per_stage, model_config.layers)
    placed = place_fake_stages(
        config,
        built,
        plan,
        sorted(set(like)),
        compiler=DescribeOnly(),
        publishes_plans=publishes_plans,
    )
    captured: dict[int, GraphPipelineStage] = {}
    fake_mode = None
    for index, part in placed.parts.items():
        captured[index] = placed.step.capture(index, part, placed.microbatch, fake_mode)
        fake_mode = captured[index].fake_mode
    return FakePipeline(
        plan=plan,
        stages=tuple(captured[index] for index in like),
        parallel_dims=built.parallel_dims,
        num_parameters=built.num_parameters,
        flops_per_token=built.flops_per_token,
        reports=placed.step.reports,
    )


def place_fake_stages(
    config: GraphTrainer.Config,
    built: MetaModel,
    plan: PipelinePlan,
    indices: Sequence[int],
    *,
    compiler: SubgraphCompiler | None = None,
    publishes_plans: bool = True,
) -> PlacedStages:
    """Cut and place some stages of a model, to be captured; within ``fake_ranks``.

    Args:
        config: as for ``capture_divided``.
        built: see ``config``.
        plan: see ``config``.
        indices: of the stages, ascending.
        compiler: of passes that compile; None for that of a run.
        publishes_plans: see ``config``.

    Raises:
        Exception: whatever placing raises, as in a real run.
    """
    model_config = _decoder_config(config)
    parts = placed_stages(
        built.model,
        plan,
        indices,
        all_indices=indices,
        parallel_dims=built.parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
        publishes_plans=publishes_plans,
    )
    loss_fn = loss_of(config).build(compile_config=config.compile)
    last: Any = parts[indices[-1]]
    if isinstance(loss_fn, ChunkedLossWrapper) and indices[-1] == plan.schedule.num_stages - 1:
        # As torchtitan's trainer does on the rank of the last stage.
        loss_fn.set_lm_head(last.lm_head)
        last._skip_lm_head = True
    if isinstance(loss_fn, LossOfParts):
        loss_fn.set_ranks(built.parallel_dims)
    step = captured_stages(
        parts,
        plan,
        loss_fn=loss_fn,
        parallel_dims=built.parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        model_config=model_config,
        device=torch.device(titan_utils.device_type),
        dump_folder=config.dump_folder,
        compiler=compiler,
    )
    tracing = tracing_options(config.compile, input_preparers=input_preparers_of(config))
    step.attach(run=_never, setup=CaptureSetup(tracing=tracing))
    # A part makes masks as a run's trainer lets it, of placed stages for a part of a batch.
    tokens, labels, token_count, extra = example_inputs(
        config,
        last,
        built.parallel_dims,
        batch_size=config.parallelism.pipeline_parallel_microbatch_size,
    )
    for part in parts.values():
        part.train()
    return PlacedStages(
        parts=parts,
        step=step,
        microbatch=MicrobatchInputs(
            args=(tokens,),
            kwargs=extra,
            target=(labels, {"global_valid_tokens": token_count}),
        ),
    )


def _decoder_config(config: GraphTrainer.Config) -> Decoder.Config:
    assert config.model_spec is not None
    assert isinstance(config.model_spec.model, Decoder.Config)
    return config.model_spec.model


def _never(**batch: object) -> torch.Tensor:
    raise AssertionError("nothing runs in a dry run")
