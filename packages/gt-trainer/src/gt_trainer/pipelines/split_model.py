"""Cut a model into pipeline stages: the ``pipelining_fn`` of all our configurations.

torchtitan's trainer hands over the model on meta and takes back a schedule and the parts that this
rank trains. Eagerly (``compile.mode none``) PyTorch's own runtime runs them; captured, prebuilt
graphs do (``gt_trainer.steps.pipelined_step``). Stages are the same in both, by
``gt_pipeline.split``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils

from gt_config import CompileConfig
from gt_passes import SubgraphCompiler
from gt_pipeline.graph import ActivationPlacement
from gt_pipeline.runner import ActivationSignature, MicrobatchInputs
from gt_pipeline.schedules import build_pipeline_schedule, limit_deferred_weights, peak_live
from gt_pipeline.split import stage_modules
from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.parallelism_options import balance_of
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.pipelines.tied_weight import TiedSchedule, tied_copies, tied_groups, untie_alone
from gt_trainer.placement.parallelize import parallelize
from gt_trainer.steps.layer_summary import layer_summary
from gt_trainer.steps.pipelined_step import PipelinedStep
from gt_trainer.steps.recipe import Recipe
from gt_trainer.steps.second_groups import create_second_groups
from gt_trainer.steps.training_step import LossFunction


def pipeline(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: TrainerCompileConfig,
    ac_config: object,
    dump_folder: str,
    device: torch.device,
    model_config: Decoder.Config,
    parallelize_fn: object,
    loss_fn: LossFunction,
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Cut ``model``, place this rank's stages, and put them under a schedule.

    Arguments and results are those of torchtitan's ``pipeline_llm``. The model stays as it is.
    Where stages are balanced, ``parallelism`` names them afterwards, on every rank alike.

    Returns:
        The schedule, this rank's parts in order of their stages, and whether the first and the last
        stage are among them.
    """
    if balance_of(parallelism) != "layers":
        names = names_of_first_rank(parallelism.module_fqns_per_model_part)
        # In place: whoever asks this rank's configuration later is told of the same stages.
        parallelism.module_fqns_per_model_part = names
    plan = pipeline_plan(
        parallelism,
        num_layers=len(model_config.layers),
        local_batch_size=training.local_batch_size,
    )
    if compile_config.mode != "none":
        plan = captured_plan(plan, compile_config)
    mesh = parallel_dims.get_mesh("pp")
    indices = plan.schedule.stages_of_rank(mesh.get_local_rank())
    parts = placed_stages(
        model,
        plan,
        indices,
        all_indices=range(plan.schedule.num_stages),
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=ac_config,
        dump_folder=dump_folder,
    )
    schedule: Any
    if compile_config.mode == "none":
        schedule = _eager_schedule(
            parts,
            plan,
            loss_fn=loss_fn,
            parallel_dims=parallel_dims,
            device=device,
            parallelism=parallelism,
        )
        if model_config.enable_weight_tying:
            copies = tied_copies(parts, plan, parallel_dims)
            schedule = TiedSchedule(schedule, parts, copies)
    else:
        schedule = captured_stages(
            parts,
            plan,
            loss_fn=loss_fn,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            model_config=model_config,
            device=device,
            dump_folder=dump_folder,
        )
    last = plan.schedule.num_stages - 1
    return schedule, list(parts.values()), 0 in parts, last in parts


def names_of_first_rank(found: list[list[str]] | None) -> list[list[str]]:
    """The modules of each stage as rank 0 found them, on every rank.

    Args:
        found: on rank 0, what was found before there was a process group; elsewhere not read.

    Raises:
        RuntimeError: on all ranks, if rank 0 has found nothing.
    """
    sent = [found]
    dist.broadcast_object_list(sent, src=0, device=torch.device(titan_utils.device_type))
    (names,) = sent
    if names is None:
        raise RuntimeError(
            "no stages were balanced before training: gt_trainer.run.train does it on rank 0, or "
            "give them by --parallelism.module_fqns_per_model_part"
        )
    return names


def captured_plan(plan: PipelinePlan, options: CompileConfig) -> PipelinePlan:
    """The plan with the schedule that captured stages run.

    Raises:
        ScheduleError: as ``limit_deferred_weights``.
    """
    limit = options.pipeline_deferred_weights
    if limit is None:
        return plan
    return replace(plan, schedule=limit_deferred_weights(plan.schedule, limit))


def cut_stages(model: Decoder, plan: PipelinePlan, indices: Iterable[int]) -> dict[int, Decoder]:
    """Some stages of ``model``, not placed, by index. The model stays as it is."""
    groups = tied_groups(model)
    parts = stage_modules(model, plan.names_per_stage, tuple(indices), shared_groups=groups)
    for part in parts.values():
        untie_alone(part)
    return cast("dict[int, Decoder]", parts)


def placed_stages(
    model: Decoder,
    plan: PipelinePlan,
    indices: Iterable[int],
    *,
    all_indices: Iterable[int],
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: TrainerCompileConfig,
    ac_config: object,
    dump_folder: str,
    publishes_plans: bool = True,
) -> dict[int, nn.Module]:
    """Some stages of ``model``, placed on the mesh, by index. The model stays as it is.

    ``all_indices`` are those that any rank places, of which rank 0 plans all; it logs and writes
    its plans if it ``publishes_plans``.
    """
    parts = cut_stages(model, plan, indices)
    if compile_config.autoparallel:
        # Imported here: no other run pays for the solver.
        from gt_autoparallel import makes_plans
        from gt_trainer.pipelines.place_stages import StagesToPlace, place_stages

        place_stages(
            parts,
            cut_stages(model, plan, all_indices) if makes_plans() else {},
            StagesToPlace(
                plan=plan,
                is_tied=model.enable_weight_tying,
                training=training,
                microbatch_size=parallelism.pipeline_parallel_microbatch_size,
                solver=compile_config.autoparallel_solver,
            ),
            parallel_dims=parallel_dims,
            dump_folder=dump_folder if publishes_plans else None,
        )
        return dict(parts)
    return {
        index: parallelize(
            part,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=ac_config,
            dump_folder=dump_folder,
        )
        for index, part in parts.items()
    }


def captured_stages(
    parts: Mapping[int, nn.Module],
    plan: PipelinePlan,
    *,
    loss_fn: LossFunction,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: TrainerCompileConfig,
    model_config: Decoder.Config,
    device: torch.device,
    dump_folder: str,
    compiler: SubgraphCompiler | None = None,
) -> PipelinedStep:
    """Stages that will be captured, under a schedule of our own.

    Args:
        parts: of ``placed_stages``.
        plan: of the whole pipeline.
        loss_fn: torchtitan's.
        parallel_dims: as for ``pipeline``; so are the others.
        training: see ``pipeline``.
        parallelism: see ``pipeline``.
        compile_config: see ``pipeline``.
        model_config: see ``pipeline``.
        device: see ``pipeline``.
        dump_folder: see ``pipeline``.
        compiler: in place of Inductor, for graphs that are not going to run.
    """
    create_second_groups(compile_config, parallel_dims, list(parts.values()))
    return PipelinedStep(
        parts,
        plan.schedule,
        loss_fn=loss_fn,
        activation=lambda microbatch: (
            _placed_activation(model_config, training, parallelism, parallel_dims)
            if compile_config.autoparallel
            else _activation(
                model_config, training, parallelism, parallel_dims, shape=_shape_of(microbatch)
            )
        ),
        pipeline_group=parallel_dims.get_mesh("pp").get_group(),
        recipe_of=_recipes(compile_config, plan, Path(dump_folder), compiler),
        device=torch.device("cpu") if device.type == "cpu" else device,  # tensors have no index
        num_live_microbatches=plan.live_microbatches,
        max_unsharded_bytes=gathered_bytes_limit(compile_config),
        shared_groups=tied_groups(model_config),
    )


def gathered_bytes_limit(options: CompileConfig) -> int | None:
    """What a rank may hold of gathered parameters, in bytes; None for no limit."""
    gib = options.pipeline_gathered_gib
    return None if gib is None else int(gib * 2**30)


def _eager_schedule(
    parts: Mapping[int, nn.Module],
    plan: PipelinePlan,
    *,
    loss_fn: LossFunction,
    parallel_dims: ParallelDims,
    device: torch.device,
    parallelism: ParallelismConfig,
) -> object:
    """PyTorch's own schedule over stages that run eagerly."""
    stages = [
        PipelineStage(
            part,
            index,
            plan.schedule.num_stages,
            device,
            group=parallel_dims.get_mesh("pp").get_group(),
            # What arrives is a local tensor, and a DTensor where the stage before had one.
            get_mesh=lambda axes, _: parallel_dims.get_mesh(list(axes)),
        )
        for index, part in parts.items()
    ]

    def scalar_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        value, _ = loss_fn(*args, **kwargs)
        return value

    csv_path = parallelism.pipeline_parallel_schedule_csv
    return build_pipeline_schedule(
        stages,
        num_microbatches=plan.schedule.num_microbatches,
        name=None if csv_path else plan.schedule.name,
        csv_path=csv_path or None,
        loss_fn=scalar_loss,
    )


def _recipes(
    options: TrainerCompileConfig,
    plan: PipelinePlan,
    dump_folder: Path,
    compiler: SubgraphCompiler | None,
) -> Callable[[int], Recipe]:
    live = peak_live(plan.schedule)
    folder = dump_folder / "graph_passes" / f"rank_{dist.get_rank()}"
    is_recorded = compiler is None and dist.get_rank() == 0

    def recipe_of(stage_index: int) -> Recipe:
        mine = options
        if options.offload_host_gib is not None:
            # The rank's, for all that is kept at once; passes see one microbatch of one stage.
            num_live = live[plan.schedule.stage_to_rank[stage_index]]
            mine = replace(options, offload_host_gib=options.offload_host_gib / num_live)
        return Recipe(
            options=mine,
            debug_folder=folder / f"stage_{stage_index}",
            compiler=compiler,
            summarize=layer_summary if is_recorded else None,
            has_folder_per_kind=True,
        )

    return recipe_of


def _activation(
    model_config: Decoder.Config,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    parallel_dims: ParallelDims,
    *,
    shape: tuple[int, int] | None = None,
) -> torch.Tensor | ActivationSignature:
    """What a decoder's layers pass on: (b, L, D), in the dtype that parameters are computed in.

    With tensor parallelism a DTensor, of which this rank's part travels: of the sequence, where
    layers pass it on in parts (sequence parallelism), else the whole on every rank. ``shape`` is
    (b, L) of another microbatch than those of training.
    """
    here = training.seq_len // parallel_dims.cp
    b, length = shape or (parallelism.pipeline_parallel_microbatch_size, here)
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    whole = (b, length, model_config.dim)
    if not parallel_dims.tp_enabled:
        return ActivationSignature(shape=whole, dtype=dtype, requires_grad=True)
    mesh = parallel_dims.get_mesh("tp")
    in_parts = parallelism.enable_sequence_parallel
    placement = ActivationPlacement(
        mesh_axes=("tp",), placements=(Shard(1) if in_parts else Replicate(),), shape=whole
    )
    part = (b, length // mesh.size() if in_parts else length, model_config.dim)
    signature = ActivationSignature(shape=part, dtype=dtype, requires_grad=True)
    return placement.example(signature, mesh)


def _placed_activation(
    model_config: Decoder.Config,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    parallel_dims: ParallelDims,
) -> ActivationSignature:
    """The same between stages that a solver placed, which take and return plain tensors."""
    from gt_trainer.placement.planned_mesh import local_token_shape, planned_shape

    return ActivationSignature(
        shape=local_token_shape(
            planned_shape(parallel_dims),
            training.seq_len,
            num_samples=parallelism.pipeline_parallel_microbatch_size,
            width=model_config.dim,
        ),
        dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        requires_grad=True,
    )


def _shape_of(microbatch: MicrobatchInputs) -> tuple[int, int] | None:
    """(b, L), which every rank knows of the positions; None of a model that takes none."""
    positions = microbatch.kwargs.get("positions")
    return None if positions is None else (positions.shape[0], positions.shape[1])
