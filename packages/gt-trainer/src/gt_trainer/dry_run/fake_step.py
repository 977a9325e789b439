"""A training step of a world that does not exist: model on meta, placed, with example inputs.

One process is rank 0 of torch's fake process group, and nothing has values, so that a step for a
thousand GPUs can be captured, simulated and measured on a laptop. Dry runs are one user; tests and
benchmarks of capture and passes are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as titan_utils

from gt_trainer._torch_internals import block_mask_of_first_rank
from gt_trainer.context_parallel.batch_of_rank import batch_of_rank
from gt_trainer.context_parallel.ring_masks import ring_masks
from gt_trainer.context_parallel.token_order import load_balancer_of
from gt_trainer.decoder.attention import attention_mask_for, has_document_mask
from gt_trainer.placement.example_batch import example_block_mask
from gt_trainer.placement.planned_loss import LossOfParts, loss_of
from gt_trainer.steps.training_step import LossFunction
from gt_trainer.trainer import GraphTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A model on meta, and the meshes that it is for."""

    model: Any
    parallel_dims: ParallelDims
    num_parameters: int
    """Parameters of the whole model, before sharding; tied parameters count once."""

    flops_per_token: int
    """torchtitan's count for the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStep(MetaModel):
    """A parallelized model, and what else a capture of one training step needs."""

    loss_fn: LossFunction
    inputs: tuple[Any, ...]
    """A batch of zeros of the configured shape: (tokens, labels, token count, extra inputs)."""

    meta_device: str
    """The device that tensors on meta represent."""


@contextmanager
def fake_step(config: GraphTrainer.Config, world_size: int, *, rank: int = 0) -> Iterator[FakeStep]:
    """Build and place the model of ``config`` on ``world_size`` ranks, of which none is started.

    The fake process group exists while the context lasts.

    Args:
        config: a finished configuration that ``preflight`` accepts.
        world_size: number of ranks.
        rank: the rank that this process represents.

    Raises:
        RuntimeError: a process group exists already.
        Exception: whatever building or placing raises, as in a real run.
    """
    with fake_ranks(world_size, rank=rank):
        yield _build(config, world_size)


@contextmanager
def fake_ranks(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Make this process one rank, the first by default, of a fake group while the context lasts.

    Raises:
        RuntimeError: a process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a fake step needs a process without a process group, and this one has one"
        )
    dist_utils.init_fake_mode(world_size, rank=rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_model(
    config: GraphTrainer.Config, world_size: int, *, parallel_dims: ParallelDims | None = None
) -> MetaModel:
    """Build the model of ``config`` without memory; within ``fake_ranks``.

    With ``parallel_dims`` it is one more model for meshes that exist.
    """
    parallel_dims = parallel_dims or ParallelDims.from_config(config.parallelism, world_size)
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    assert spec is not None
    spec.model.update_from_config(config=config)
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        model: Any = spec.model.build()
    _, flops_per_token = spec.model.get_nparams_and_flops(model, config.training.seq_len)
    return MetaModel(
        model=model,
        parallel_dims=parallel_dims,
        num_parameters=sum(p.numel() for p in model.parameters()),
        flops_per_token=flops_per_token,
    )


def _build(config: GraphTrainer.Config, world_size: int) -> FakeStep:
    built = meta_model(config, world_size)
    spec = config.model_spec
    assert spec is not None
    model: Any = spec.parallelize_fn(
        built.model,
        parallel_dims=built.parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    return step_of_placed(config, model, built)


def step_of_placed(config: GraphTrainer.Config, model: Any, built: MetaModel) -> FakeStep:
    """The step of a model that has been placed.

    Args:
        config: of the run.
        model: ``built.model``, placed.
        built: what it was.
    """
    parallel_dims = built.parallel_dims
    model.train()
    return FakeStep(
        model=model,
        loss_fn=loss_for(config, model, parallel_dims),
        inputs=example_inputs(
            config, model, parallel_dims, batch_size=config.training.local_batch_size
        ),
        parallel_dims=parallel_dims,
        num_parameters=built.num_parameters,
        flops_per_token=built.flops_per_token,
        meta_device=titan_utils.device_type,
    )


def loss_for(
    config: GraphTrainer.Config, last: Any, parallel_dims: ParallelDims, *, has_head: bool = True
) -> LossFunction:
    """Return the loss of ``config`` as torchtitan's trainer prepares it.

    Args:
        config: of the run.
        last: the model, or its last part that is here.
        parallel_dims: of the run.
        has_head: whether the output projection is in ``last``. A chunked loss takes it over.
    """
    loss_fn: LossFunction = loss_of(config).build(compile_config=config.compile)
    if isinstance(loss_fn, ChunkedLossWrapper) and has_head:
        loss_fn.set_lm_head(last.lm_head)
        last._skip_lm_head = True
    if isinstance(loss_fn, LossOfParts):
        loss_fn.set_ranks(parallel_dims)
    return loss_fn


def example_inputs(
    config: GraphTrainer.Config, model: Any, parallel_dims: ParallelDims, *, batch_size: int
) -> tuple[Any, ...]:
    """A batch of zeros of the configured length: (tokens, labels, token count, extra inputs).

    Of a sequence that ranks share, it has the first rank's tokens. Masks are on meta, since those
    of long sequences have more bytes than this machine.
    """
    shape = (batch_size, config.training.seq_len)
    whole = torch.arange(shape[1], device="meta").expand(shape).contiguous()
    device = titan_utils.device_type
    tokens = torch.zeros(
        (batch_size, shape[1] // parallel_dims.cp), dtype=torch.int64, device=device
    )
    extra: dict[str, Any] = {"positions": torch.zeros_like(tokens)}
    mask = _example_mask(config, model, parallel_dims, whole)
    if mask is not None:
        extra["attention_masks"] = mask
    return tokens, tokens.clone(), torch.tensor(tokens.numel(), device=device), extra


def _example_mask(
    config: GraphTrainer.Config, model: Any, parallel_dims: ParallelDims, positions: torch.Tensor
) -> Any:
    """The mask of this rank's tokens; ``positions`` (B, L) are of whole sequences, on meta."""
    num_ranks = parallel_dims.cp
    balancer = load_balancer_of(config.parallelism.context_parallel_load_balancer)
    blocks = example_block_mask(model, positions)
    if blocks is not None and num_ranks > 1:
        with torch.compiler.set_stance("force_eager"):
            mine = block_mask_of_first_rank(blocks, num_ranks, balancer)
        in_a_ring = config.compile.context_parallel == "ring"
        return ring_masks(mine, num_ranks=num_ranks, rank=0) if in_a_ring else mine
    if blocks is not None or num_ranks == 1:
        return blocks if blocks is not None else attention_mask_for(model, positions)
    if not has_document_mask(model.config):
        return None
    batch = {"input": positions, "positions": positions}
    mesh = parallel_dims.get_mesh("cp")
    strategy = config.compile.context_parallel
    _, _, extra = batch_of_rank(batch, positions, mesh, load_balancer=balancer, strategy=strategy)
    return extra["attention_masks"]
