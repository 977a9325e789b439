"""Numbers of one training step from its configuration: tokens, microbatches, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchtitan.distributed import ParallelDims

from gt_passes.simulation import Hardware, optimizer_step_us
from gt_pipeline.estimates import ADAM_STATES
from gt_trainer.dry_run.fake_step import MetaModel
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Numbers of one training step from its configuration."""

    num_gpus: int
    tokens: int
    """Trained by one step, over all ranks and microbatches."""

    num_microbatches: int
    """Forward and backward passes of one step (gradient accumulation)."""

    flops_per_token: int
    """Forward and backward, as torchtitan counts them for its MFU."""

    num_parameters_per_rank: int
    parameter_bytes_per_rank: int
    clips_gradients: bool

    def optimizer_us(self, hardware: Hardware) -> float:
        """Return the time of clipping and a fused AdamW."""
        return optimizer_step_us(
            self.num_parameters_per_rank,
            hardware,
            num_states=ADAM_STATES,
            clips_gradients=self.clips_gradients,
        )


def step_facts(
    config: GraphTrainer.Config, built: MetaModel, stored: Sequence[torch.Tensor]
) -> StepFacts:
    """Return the numbers of a training step, as torchtitan's trainer reads the configuration.

    Args:
        config: finished.
        built: its model.
        stored: parameters as this rank stores them.
    """
    training, parallel_dims = config.training, built.parallel_dims
    batch_degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
    samples = training.local_batch_size * batch_degree
    global_batch_size = training.global_batch_size if training.global_batch_size > 0 else samples
    return StepFacts(
        num_gpus=parallel_dims.world_size,
        tokens=global_batch_size * training.seq_len,
        num_microbatches=max(1, global_batch_size // samples),
        flops_per_token=built.flops_per_token,
        num_parameters_per_rank=sum(p.numel() for p in stored),
        parameter_bytes_per_rank=sum(p.numel() * p.element_size() for p in stored),
        clips_gradients=training.max_norm > 0,
    )


def degrees_of(parallel_dims: ParallelDims) -> tuple[tuple[str, int], ...]:
    """Mesh axes above 1, by name."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    degrees = ((name, int(getattr(parallel_dims, name))) for name in names)
    return tuple((name, degree) for name, degree in degrees if degree > 1)
