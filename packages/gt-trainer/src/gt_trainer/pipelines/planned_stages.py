"""What a pipeline's stages are planned with: their microbatch, and what neighbours agree on.

A stage is placed on the mesh of its own pipeline rank, without the pipeline's axis. What travels
between two stages is the hidden state of a microbatch, of which each rank sends its shard to the
rank at its place of the next stage. So both must have one layout for it, whatever else they plan:
samples over the axes of data, as loaders cut batches, and the sequence over tensor parallelism's,
as layers pass it on that are parallelized by hand. Where the sequence does not divide, each rank
has all of it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.models.common.decoder import Decoder

from gt_autoparallel import Constraints, MeshShape, Microbatches, tensors_of_parts
from gt_config import ExpertPlacement
from gt_pipeline.split import TORCHTITAN_NAMING
from gt_trainer.decoder.tied_stages import EMBEDDING, PROJECTION
from gt_trainer.pipelines.pipeline_plan import PipelinePlan
from gt_trainer.placement.example_batch import example_inputs, example_kwargs
from gt_trainer.placement.memory_budget import loss_bytes
from gt_trainer.placement.planned_mesh import (
    batch_layout,
    expert_layouts,
    expert_token_layouts,
    local_token_shape,
    num_batch_shards,
    token_layout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBatch:
    """One microbatch of all ranks of a stage, without data, as the stage's forward takes it."""

    inputs: tuple[torch.Tensor, ...]
    """Tokens (B, L) of the first stage; of others the hidden state (B, L, D), which needs a
    gradient."""

    kwargs: dict[str, Any]


def stage_name(index: int) -> str:
    """What the plan of a stage is called, in files too."""
    return f"stage {index}"


def stages_of_plan(path: Path) -> list[list[str]]:
    """The modules of each stage that the plans of a file are for.

    Stages that were cut where a solver said are cut there again, whatever it would say now.

    Args:
        path: of the file.

    Raises:
        PlanMismatchError: as ``gt_autoparallel.tensors_of_parts``.
        OSError: the file cannot be read.
    """
    parts = tensors_of_parts(path)
    return [
        _units_with(parts[stage_name(index)])
        for index in range(len(parts))
        if stage_name(index) in parts
    ]


def _units_with(tensors: Collection[str]) -> list[str]:
    """Modules that are not divided among stages, of which some have such parameters, in order."""
    naming = TORCHTITAN_NAMING
    layer = re.compile(rf"{naming.layers}\.(\d+)\.")
    layers = sorted({int(found[1]) for name in tensors if (found := layer.match(name))})
    tops = {name.partition(".")[0] for name in tensors}
    return [
        *(name for name in naming.first if name in tops),
        *(f"{naming.layers}.{index}" for index in layers),
        *(name for name in naming.last if name in tops),
    ]


def microbatches_of(plan: PipelinePlan) -> Microbatches:
    """How a step runs each stage."""
    count = plan.num_microbatches
    live = min(plan.live_microbatches, count)
    return Microbatches(num_in_step=count, num_live=live, num_graphs=plan.stages_of_fullest_rank)


def stage_budget_bytes(
    budget_bytes: int,
    part: Decoder,
    index: int,
    plan: PipelinePlan,
    training: TrainingConfig,
    mesh: MeshShape,
    *,
    microbatch_size: int,
) -> int:
    """What the plan of a stage may take of a rank's memory.

    It leaves room for what no plan has: what stages before have sent for each live microbatch.

    Args:
        budget_bytes: of a rank.
        part: see ``stage_batch``; so are the others.
        index: see ``stage_batch``.
        plan: the pipeline.
        training: see ``stage_batch``.
        mesh: see ``stage_batch``.
        microbatch_size: see ``stage_batch``.
    """
    may_take = int(budget_bytes * plan.memory_share(index))
    if index > 0:
        shape = local_token_shape(
            mesh, training.seq_len, num_samples=microbatch_size, width=part.config.dim
        )
        dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
        may_take -= math.prod(shape) * dtype.itemsize * microbatches_of(plan).num_live
    return max(1, may_take)


def stage_loss_bytes(
    part: Decoder,
    index: int,
    plan: PipelinePlan,
    training: TrainingConfig,
    mesh: MeshShape,
    *,
    microbatch_size: int,
) -> int:
    """What a microbatch's loss takes, on the last stage; see ``stage_budget_bytes``."""
    if index < plan.schedule.num_stages - 1:
        return 0
    vocab_size = part.config.vocab_size
    return loss_bytes(mesh, training, num_samples=microbatch_size, vocab_size=vocab_size)


def stage_batch(
    part: Decoder, index: int, training: TrainingConfig, mesh: MeshShape, *, microbatch_size: int
) -> StageBatch:
    """The microbatch that a stage is planned with.

    Args:
        part: the modules of the stage.
        index: of the stage.
        training: gives the sequence length, and the dtype of hidden states.
        mesh: of one stage.
        microbatch_size: samples of one rank.
    """
    of_microbatch = replace(training, local_batch_size=microbatch_size)
    (tokens,) = example_inputs(of_microbatch, num_batch_shards(mesh))
    kwargs = example_kwargs(part, of_microbatch, num_batch_shards(mesh))
    if index == 0:
        return StageBatch(inputs=(tokens,), kwargs=kwargs)
    hidden = torch.empty(
        (*tokens.shape, part.config.dim),
        dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        device="meta",
        requires_grad=True,
    )
    return StageBatch(inputs=(hidden,), kwargs=kwargs)


def demands_of_stage(
    part: Decoder,
    index: int,
    *,
    experts: ExpertPlacement,
    mesh: MeshShape,
    seq_len: int,
    is_tied: bool,
) -> Constraints:
    """What the plan of a stage must keep.

    Args:
        part: the modules of the stage.
        index: of the stage.
        experts: how routed experts may be placed.
        mesh: of one stage.
        seq_len: tokens of a sample.
        is_tied: whether two stages hold one weight, whose copies must lie alike.
    """
    batch, border = batch_layout(mesh), token_layout(mesh, seq_len)
    hidden = next(iter(inspect.signature(part.forward).parameters))
    has_experts = any(getattr(layer, "moe", None) is not None for layer in part.layers.values())
    return Constraints(
        inputs={"*": batch} if index == 0 else {"*": batch, hidden: border},
        outputs={"output": border},
        parameters=_tied_layouts(part, mesh) if is_tied else {},
        experts=expert_layouts(experts, mesh) if has_experts else {},
        expert_tokens=expert_token_layouts(mesh) if has_experts else {},
    )


def _tied_layouts(part: Decoder, mesh: MeshShape) -> Mapping[str, tuple[Placement, ...]]:
    """Rows of the vocabulary over as many axes as divide them; the same on every stage."""
    found: dict[str, tuple[Placement, ...]] = {}
    for name, parameter in part.named_parameters():
        if name not in (EMBEDDING, PROJECTION):
            continue
        rows, layout = parameter.shape[0], list[Placement]()
        for size in mesh.sizes:
            divides = rows % size == 0
            rows //= size if divides else 1
            layout.append(Shard(0) if divides else Replicate())
        found[name] = tuple(layout)
    return found
