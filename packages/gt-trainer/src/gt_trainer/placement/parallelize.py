"""Place a decoder on the device mesh: torchtitan's tensor and expert parallelism, our data one.

torchtitan 0.3.0 has one ``parallelize_fn`` a model, all alike (``torchtitan/models/llama3/
parallelize.py``, ``.../deepseek_v3/parallelize.py``, ``torchtitan/distributed/fsdp.py``): the model
shards itself for TP and EP by its sharding configuration, and FSDP2 shards what is left. This one
function serves all decoders, and puts ``gt_trace.fsdp`` in FSDP2's place, whose collectives
a capture records. It is the model specification's ``parallelize_fn`` in all our configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import RoutedExperts

from gt_config import CompileConfig
from gt_trace.fsdp import MixedPrecision, ShardingMode, shard
from gt_trainer.context_parallel.attend_to_all_ranks import attend_to_all_ranks
from gt_trainer.decoder.initialization import draw_whole_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """How one group of parameters is kept: the mesh of its data-parallel axes, and the mode."""

    mesh: DeviceMesh
    mode: ShardingMode


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: object,
    ac_config: object,
    dump_folder: str,
) -> Decoder:
    """Place ``model`` in place, and return it.

    Attention over ranks that share a sequence comes first, then TP and EP, by the model's own
    ``parallelize``. Then routed experts are sharded over
    the ranks that hold the same experts, and everything else over all data-parallel ranks.
    Gradients are summed over ranks, not averaged: the loss is divided by the token count of all
    ranks. Also a model that no data parallelism shards goes through ``simple_fsdp``, which casts to
    the mixed-precision dtypes.

    With ``--compile.autoparallel`` none of this happens: a solver's plan says how each parameter is
    sharded (``gt_trainer.placement``), and the degrees are the axes of the mesh that it plans.

    Args:
        model: A torchtitan decoder, usually on the meta device; not placed yet.
        parallel_dims: torchtitan's meshes.
        training: Gives the mixed-precision dtypes.
        parallelism: Not read: ``gt_trainer.preflight`` has refused what this placement does not do.
        compile_config: Says whether a solver places the model, and how ranks that share sequences
            attend; nothing else of it is read, since capture and compilation come after placement.
        ac_config: torchtitan's activation checkpointing; None, since recomputation is a graph pass
            here, and refused likewise.
        dump_folder: Where a solver's plan is written.
    """
    if isinstance(compile_config, CompileConfig) and compile_config.autoparallel:
        # Imported here: no other run pays for the solver.
        from gt_trainer.placement.place_decoder import place_decoder

        return place_decoder(
            model,
            parallel_dims=parallel_dims,
            training=training,
            solver=compile_config.autoparallel_solver,
            dump_folder=dump_folder,
        )
    if parallel_dims.cp_enabled:
        assert isinstance(compile_config, CompileConfig)
        attend_to_all_ranks(
            model, parallel_dims.get_mesh("cp"), strategy=compile_config.context_parallel
        )
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    precision = MixedPrecision(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    for name, experts in _routed_experts(model):
        shard_dim = _expert_shard_dim(experts.num_experts, parallel_dims)
        if not parallel_dims.ep_enabled and shard_dim == 0:
            continue  # as any other parameter, below
        placement = _expert_placement(parallel_dims)
        shard(
            experts,
            placement.mesh,
            mode=placement.mode,
            mixed_precision=precision,
            shard_dim=shard_dim,
            reduction="sum",
            prefix=name,
        )
    placement = dense_placement(parallel_dims)
    uneven = _unevenly_split(model, parallel_dims.get_mesh("fsdp").size())
    if uneven is not None:
        shard(
            uneven,
            placement.mesh,
            mode=placement.mode,
            mixed_precision=precision,
            shard_dim=1,
            reduction="sum",
        )
    shard(model, placement.mesh, mode=placement.mode, mixed_precision=precision, reduction="sum")
    draw_whole_weights(model)
    return model


def _unevenly_split(model: Decoder, num_shards: int) -> nn.Module | None:
    """Collect the model's own layers whose dim 0 TP splits into parts that FSDP cannot split.

    That is the vocabulary: Llama 3's 128,256 tokens over TP 8 and FSDP 128. Such weights are
    sharded along dim 1 instead. One module holds them under their names in the model, so that tied
    weights stay one weight.
    """
    uneven = nn.Module()
    for name, child in model.named_children():
        for parameter in child.parameters(recurse=False):
            if not isinstance(parameter, DTensor) or Shard(0) not in parameter.placements:
                continue
            if parameter.to_local().shape[0] % num_shards != 0:
                uneven.add_module(name, child)
    return uneven if any(True for _ in uneven.children()) else None


def _routed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield f"{name}.inner_experts", module.inner_experts


def _expert_shard_dim(num_experts: int, parallel_dims: ParallelDims) -> int:
    """Shard along experts; along the next dim if some ranks would be left without an expert."""
    if parallel_dims.ep_enabled:
        num_shards = parallel_dims.get_mesh("efsdp").size() * parallel_dims.ep
    else:
        num_shards = parallel_dims.get_mesh("fsdp").size()
    return 1 if num_shards > num_experts else 0


def dense_placement(parallel_dims: ParallelDims) -> DataParallel:
    """Over all data-parallel ranks."""
    if not parallel_dims.dp_replicate_enabled:
        return DataParallel(mesh=parallel_dims.get_mesh("fsdp"), mode="shard")
    if parallel_dims.get_mesh("fsdp").size() == 1:
        return DataParallel(mesh=parallel_dims.get_mesh("dp_replicate"), mode="replicate")
    return DataParallel(mesh=parallel_dims.get_mesh(["dp_replicate", "fsdp"]), mode="hybrid_shard")


def _expert_placement(parallel_dims: ParallelDims) -> DataParallel:
    """The axes beside EP. Of one rank too: they must come from the mesh that EP is part of."""
    if not parallel_dims.ep_enabled:
        return dense_placement(parallel_dims)
    if not parallel_dims.dp_replicate_enabled:
        return DataParallel(mesh=parallel_dims.get_mesh("efsdp"), mode="shard")
    return DataParallel(mesh=parallel_dims.get_mesh(["dp_replicate", "efsdp"]), mode="hybrid_shard")
