"""Validation of a run whose model a solver placed: on the forward that was planned."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_autoparallel import allow_evaluation
from gt_trainer.placement.example_batch import example_inputs, example_kwargs
from gt_trainer.placement.expert_blocks import expert_blocks
from gt_trainer.placement.planned_mesh import num_batch_shards, planned_shape


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
    allow_evaluation(
        model,
        whole,
        example_inputs(training, num_shards),
        example_kwargs=example_kwargs(whole, training, num_shards),
        compute_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        experts=expert_blocks(whole),
        device=titan_utils.device_type,
    )
