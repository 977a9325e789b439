"""The stages of a pipeline that does not exist, each kind captured once by the code of a real run.

This process is rank 0 of torch's fake process group. Other pipeline ranks hold other stages over
meshes of the same shape, so their stages are placed on this rank's meshes: what a rank computes
depends on its stages alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_passes import DescribeOnly
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import MicrobatchInputs
from gt_trainer.dry_run.equal_stages import equal_stages
from gt_trainer.dry_run.fake_step import MetaModel, example_inputs
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.pipelines.split_model import captured_plan, captured_stages, placed_stages
from gt_trainer.placement.planned_loss import LossOfParts, loss_of
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_stage import StageCaptureReport
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePipeline:
    """All stages of a pipeline, captured."""

    plan: PipelinePlan
    stages: tuple[GraphPipelineStage, ...]
    """For each stage the one that was captured for it; equal stages share one."""

    parallel_dims: ParallelDims
    num_parameters: int
    flops_per_token: int
    clock: StartupClock
    reports: tuple[StageCaptureReport, ...]
    """Of each capture."""

    @property
    def captured(self) -> tuple[GraphPipelineStage, ...]:
        """Each distinct stage once."""
        return tuple(dict.fromkeys(self.stages))


def planned_pipeline(config: GraphTrainer.Config) -> PipelinePlan:
    """The pipeline of captured stages that ``config`` asks for."""
    spec = config.model_spec
    assert spec is not None
    assert isinstance(spec.model, Decoder.Config)
    plan = pipeline_plan(
        config.parallelism,
        num_layers=len(spec.model.layers),
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
    assert config.model_spec is not None
    model_config = config.model_spec.model
    assert isinstance(model_config, Decoder.Config)
    like = equal_stages(plan.names_per_stage, model_config.layers)
    parts = placed_stages(
        built.model,
        plan,
        sorted(set(like)),
        all_indices=sorted(set(like)),
        parallel_dims=built.parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
        publishes_plans=publishes_plans,
    )
    loss_fn = loss_of(config).build(compile_config=config.compile)
    last: Any = parts[like[-1]]
    if isinstance(loss_fn, ChunkedLossWrapper):
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
        compiler=DescribeOnly(),
    )
    clock = StartupClock()
    step.attach(run=_never, clock=clock, on_capture=lambda report: None)
    # A part makes masks as a run's trainer lets it, of placed stages for a part of a batch.
    tokens, labels, token_count, extra = example_inputs(
        config,
        last,
        built.parallel_dims,
        batch_size=config.parallelism.pipeline_parallel_microbatch_size,
    )
    microbatch = MicrobatchInputs(
        args=(tokens,),
        kwargs=extra,
        target=(labels, {"global_valid_tokens": token_count}),
    )
    captured: dict[int, GraphPipelineStage] = {}
    fake_mode = None
    for index, part in parts.items():
        part.train()
        captured[index] = step.capture(index, part, microbatch, fake_mode)
        fake_mode = captured[index].fake_mode
    return FakePipeline(
        plan=plan,
        stages=tuple(captured[index] for index in like),
        parallel_dims=built.parallel_dims,
        num_parameters=built.num_parameters,
        flops_per_token=built.flops_per_token,
        clock=clock,
        reports=step.reports,
    )


def _never(**batch: object) -> torch.Tensor:
    raise AssertionError("nothing runs in a dry run")
