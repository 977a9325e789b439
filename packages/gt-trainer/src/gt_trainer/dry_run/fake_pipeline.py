"""The stages of a pipeline that does not exist, placed by the code of a real run.

This process is rank 0 of torch's fake process group. Other pipeline ranks hold other stages over
meshes of the same shape, so their stages are placed on this rank's meshes: what a rank computes
depends on its stages alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_passes import SubgraphCompiler
from gt_pipeline.runner import MicrobatchInputs
from gt_trainer.dry_run.fake_step import MetaModel, example_inputs, loss_for
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.pipelines.split_model import captured_plan, captured_stages, placed_stages
from gt_trainer.startup import StartupClock
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.program import tracing_options
from gt_trainer.steps.program_step import CaptureSetup
from gt_trainer.trainer import GraphTrainer, input_preparers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStages:
    """Some stages of a pipeline, placed and in training mode, not captured yet."""

    parts: Mapping[int, nn.Module]
    """Modules by stage index, on meta."""

    step: PipelinedStep
    microbatch: MicrobatchInputs
    """A microbatch of zeros, in the form of a run."""


def planned_pipeline(config: GraphTrainer.Config) -> PipelinePlan:
    """The pipeline of captured stages that ``config`` asks for."""
    plan = pipeline_plan(
        config.parallelism,
        num_layers=len(decoder_config(config).layers),
        local_batch_size=config.training.local_batch_size,
    )
    return captured_plan(plan, config.compile)


def place_fake_stages(
    config: GraphTrainer.Config,
    built: MetaModel,
    plan: PipelinePlan,
    indices: Sequence[int],
    *,
    compiler: SubgraphCompiler | None = None,
    publishes_plans: bool = True,
    clock: StartupClock | None = None,
) -> PlacedStages:
    """Cut and place some stages of a model, to be captured; within ``fake_ranks``.

    Args:
        config: a finished configuration that ``preflight`` accepts; its pipeline degree is 2 or
            more.
        built: the model of ``config``. Not changed.
        plan: which modules each stage has. Of its schedule only the stages count, and what may be
            offloaded for each chunk that it keeps.
        indices: of the stages, ascending.
        compiler: of passes that compile; None for that of a run.
        publishes_plans: whether a solver's plans are logged, and written to the dump folder.
        clock: counts capture and passes; None for a new one.

    Raises:
        Exception: whatever placing raises, as in a real run.
    """
    model_config = decoder_config(config)
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
    last, has_head = parts[indices[-1]], indices[-1] == plan.schedule.num_stages - 1
    step = captured_stages(
        parts,
        plan,
        loss_fn=loss_for(config, last, built.parallel_dims, has_head=has_head),
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
    setup = CaptureSetup(clock=clock or StartupClock(), tracing=tracing)
    step.attach(run=_never, setup=setup)
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


def decoder_config(config: GraphTrainer.Config) -> Decoder.Config:
    """Return the configuration of the model, which is a decoder where there is a pipeline."""
    assert config.model_spec is not None
    assert isinstance(config.model_spec.model, Decoder.Config)
    return config.model_spec.model


def _never(**batch: object) -> torch.Tensor:
    raise AssertionError("nothing runs in a dry run")
