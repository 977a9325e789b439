"""Validation of placed models and of placed stages: on the forward that was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_autoparallel import allow_evaluation
from gt_trainer.pipelines.pipeline_plan import PipelinePlan
from gt_trainer.pipelines.planned_stages import stage_batch
from gt_trainer.pipelines.split_model import cut_stages
from gt_trainer.placement.example_batch import example_inputs, example_kwargs
from gt_trainer.placement.expert_blocks import expert_blocks
from gt_trainer.placement.planned_mesh import num_batch_shards, planned_shape


def allow_validation_of_stages(
    parts: Mapping[int, nn.Module],
    plan: PipelinePlan,
    model_config: Decoder.Config,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    microbatch_size: int,
) -> None:
    """Let placed stages validate, if in evaluation mode they compute what was planned.

    Every rank captures its stages once more, on meta.

    Args:
        parts: this rank's, by the indices of their stages.
        plan: of the whole pipeline.
        model_config: of the model that was cut.
        parallel_dims: of the run.
        training: as the stages were planned with.
        microbatch_size: likewise.

    Raises:
        PlanMismatchError: evaluation computes something else; names where.
    """
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        whole: Any = model_config.build()
    mesh = planned_shape(parallel_dims)
    for index, part in cut_stages(whole, plan, parts).items():
        batch = stage_batch(part, index, training, mesh, microbatch_size=microbatch_size)
        _allow(parts[index], part, batch.inputs, batch.kwargs, training)


def allow_validation(
    model: Decoder, *, parallel_dims: ParallelDims, training: TrainingConfig
) -> None:
    """Let a placed decoder validate, if in evaluation mode it computes what was planned.

    Every rank captures the model once more, on meta.

    Args:
        model: placed by ``place_decoder``.
        parallel_dims: of the run.
        training: as the model was planned with.

    Raises:
        PlanMismatchError: evaluation computes something else; names where.
    """
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        whole: Any = model.config.build()
    num_shards = num_batch_shards(planned_shape(parallel_dims))
    inputs = example_inputs(training, num_shards)
    _allow(model, whole, inputs, example_kwargs(whole, training, num_shards), training)


def _allow(
    placed: nn.Module, whole: Any, inputs: Any, kwargs: Any, training: TrainingConfig
) -> None:
    allow_evaluation(
        placed,
        whole,
        inputs,
        example_kwargs=kwargs,
        compute_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        experts=expert_blocks(whole),
        device=titan_utils.device_type,
    )
