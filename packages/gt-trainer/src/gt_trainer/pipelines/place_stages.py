"""Plan the stages of a pipeline and place those of this rank: ``place_decoder`` for several parts.

Rank 0 plans all stages, alike ones once, and every rank gets all plans, so that a failure is raised
everywhere and neighbours agree on what travels between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from gt_autoparallel import (
    Constraints,
    MeshShape,
    PartToPlace,
    PlacementPlan,
    PlacementRequest,
    apply_plan,
    find_placements,
    load_plan,
    make_expert_meshes,
    plan_report,
    plans_on_first_rank,
    write_plans,
    write_report_page,
)
from gt_config import AutoParallelConfig
from gt_trainer.decoder.initialization import draw_whole_weights
from gt_trainer.pipelines.pipeline_plan import PipelinePlan
from gt_trainer.pipelines.planned_stages import (
    demands_of_stage,
    microbatches_of,
    stage_batch,
    stage_budget_bytes,
    stage_loss_bytes,
    stage_name,
)
from gt_trainer.placement.expert_blocks import expert_blocks, uncounted_routing
from gt_trainer.placement.kept_plan import PLAN_FILE
from gt_trainer.placement.masks_of_parts import make_masks_of_parts
from gt_trainer.placement.memory_budget import asked_budget_bytes, memory_budget
from gt_trainer.placement.planned_machine import planned_machine
from gt_trainer.placement.planned_mesh import num_batch_shards, planned_mesh
from gt_trainer.placement.reasons import reasons_of_dry_run


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesToPlace:
    """The stages of one pipeline, and what all of their plans depend on."""

    plan: PipelinePlan
    is_tied: bool
    """Whether embedding and output projection are one weight, on two stages."""

    training: TrainingConfig
    microbatch_size: int
    solver: AutoParallelConfig


def place_stages(
    parts: Mapping[int, Decoder],
    every_part: Mapping[int, Decoder],
    stages: StagesToPlace,
    *,
    parallel_dims: ParallelDims,
    dump_folder: str | None,
) -> None:
    """Plan stages, and place those of this rank, in place.

    Rank 0 logs the plans as tables, and writes them to ``placement.json`` and a page for each to
    the dump folder, if there is one. All ranks call it.

    Args:
        parts: this rank's stages by index, on the meta device, not placed yet.
        every_part: likewise, those of all ranks; read on rank 0 only, and not placed.
        stages: the pipeline.
        parallel_dims: torchtitan's meshes; the axes of one stage are planned.
        dump_folder: for the files; None: the plans are not published.

    Raises:
        PlacementError: a stage cannot be planned, no plan keeps the memory budget, the plan of the
            file is not for this run, or the dump folder cannot be written to.
    """
    mesh = planned_mesh(parallel_dims)

    def published_plans() -> dict[int, PlacementPlan]:
        plans = stage_plans(every_part, stages, MeshShape.of(mesh))
        if dump_folder is not None:
            _publish(plans, Path(dump_folder))
        return plans

    shared = plans_on_first_rank(
        published_plans,
        device=titan_utils.device_type,
        cost_model=planned_machine().cost_model(),
        microbatches=microbatches_of(stages.plan),
    )
    expert_meshes = make_expert_meshes((each.plan for each in shared.values()), mesh)
    for index, part in parts.items():
        blocks = expert_blocks(part)
        of_stage = shared[index]
        apply_plan(
            part,
            of_stage.plan,
            mesh,
            experts=blocks,
            interface=of_stage.interface,
            expert_meshes=expert_meshes,
        )
        if num_batch_shards(MeshShape.of(mesh)) > 1:
            make_masks_of_parts(part)
        draw_whole_weights(part)


def stage_plans(
    every_part: Mapping[int, Decoder], stages: StagesToPlace, mesh: MeshShape
) -> dict[int, PlacementPlan]:
    """The plan of each stage: searched for, or read from ``solver.plan`` and seen to be for it."""
    solver, training = stages.solver, stages.training
    budget, asked_bytes = memory_budget(solver), asked_budget_bytes(solver)

    def share_of(num_bytes: int, index: int) -> int:
        part, size = every_part[index], stages.microbatch_size
        return stage_budget_bytes(
            num_bytes, part, index, stages.plan, training, mesh, microbatch_size=size
        )

    may_take = {index: share_of(budget.num_bytes, index) for index in every_part}
    logger.info(
        f"Placement: {budget}, of which stages may take "
        + ", ".join(f"{each / 2**30:.2f} GiB" for each in sorted({*may_take.values()}))
    )
    asked: dict[int, PartToPlace] = {}
    with ExitStack() as stack:
        for index, part in every_part.items():
            stack.enter_context(uncounted_routing(part))
            batch = stage_batch(part, index, training, mesh, microbatch_size=stages.microbatch_size)
            asked[index] = PartToPlace(
                model=part,
                example_inputs=batch.inputs,
                example_kwargs=batch.kwargs,
                request=PlacementRequest(
                    cost_model=planned_machine().cost_model(),
                    constraints=demands_of_stage(
                        part,
                        index,
                        experts=solver.experts,
                        mesh=mesh,
                        seq_len=training.seq_len,
                        is_tied=stages.is_tied,
                    ),
                    memory_budget_bytes=may_take[index],
                    microbatches=microbatches_of(stages.plan),
                    loss_bytes=stage_loss_bytes(
                        part,
                        index,
                        stages.plan,
                        training,
                        mesh,
                        microbatch_size=stages.microbatch_size,
                    ),
                    compute_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
                    reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
                    experts=expert_blocks(part),
                    device=titan_utils.device_type,
                    relative_gap=solver.relative_gap,
                    time_limit_seconds=solver.time_limit_seconds,
                    progress=lambda line: logger.info(f"Placement: {line}"),
                ),
            )
        if solver.plan is None:
            return find_placements(asked, mesh)
        logger.info(f"Placement: the plans of {solver.plan}")
        return {
            index: _loaded(
                part,
                index,
                solver.plan,
                mesh,
                made_for_budget_bytes=None if asked_bytes is None else share_of(asked_bytes, index),
            )
            for index, part in asked.items()
        }


def _loaded(
    part: PartToPlace,
    index: int,
    path: str,
    mesh: MeshShape,
    *,
    made_for_budget_bytes: int | None,
) -> PlacementPlan:
    request = part.request
    assert isinstance(request.memory_budget_bytes, int)
    assert isinstance(request.constraints, Constraints)
    return load_plan(
        path,
        part.model,
        mesh,
        part.example_inputs,
        example_kwargs=part.example_kwargs,
        microbatches=request.microbatches,
        part=stage_name(index),
        cost_model=request.cost_model,
        constraints=request.constraints,
        memory_budget_bytes=request.memory_budget_bytes,
        made_for_budget_bytes=made_for_budget_bytes,
        loss_bytes=request.loss_bytes,
        compute_dtype=request.compute_dtype,
        reduce_dtype=request.reduce_dtype,
        experts=request.experts,
        device=request.device,
    )


def _publish(plans: Mapping[int, PlacementPlan], folder: Path) -> None:
    first_with: dict[object, int] = {}
    reasons: dict[int, Mapping[str, object]] = {}
    num_plans = len({plan.options for plan in plans.values()})
    for index, plan in plans.items():
        name = stage_name(index)
        first = first_with.setdefault(plan.options, index)
        if first == index:
            logger.info(f"Placement of {name}:\n{plan_report(plan)}")
            reasons[index] = reasons_of_dry_run(plan, num_plans=num_plans)
        else:
            logger.info(f"Placement of {name}: as {stage_name(first)}")
        # Alike stages have alike parameters, in the same order.
        parameters = (str(node.target) for node in plan.graph.of_kind("parameter"))
        write_report_page(
            plan,
            folder / f"placement_stage_{index}.html",
            reasons=dict(zip(parameters, reasons[first].values(), strict=False)),
        )
    write_plans({stage_name(index): plan for index, plan in plans.items()}, folder / PLAN_FILE)
    logger.info(f"Placement: the plans as pages are {folder / 'placement_stage_*.html'}")
