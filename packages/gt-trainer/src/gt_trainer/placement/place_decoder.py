"""Plan a decoder on the run's mesh and apply the plan: what ``parallelize`` does with a solver.

Rank 0 plans, or reads the plan of a file, publishes the plan, and the others get it, so that all
ranks have the same one and only one of them pays for it. A failure of rank 0 is raised on every
rank.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from gt_autoparallel import (
    Constraints,
    Judge,
    MeshShape,
    PlacementPlan,
    PlacementRequest,
    SharedPlan,
    apply_plan,
    find_placement,
    load_plan,
    plan_on_first_rank,
    plan_report,
    write_plan,
    write_report_page,
)
from gt_config import AutoParallelConfig, ExpertPlacement
from gt_trainer.decoder.initialization import draw_whole_weights
from gt_trainer.placement.example_batch import example_inputs, example_kwargs
from gt_trainer.placement.expert_blocks import TitanExpertBlock, expert_blocks, uncounted_routing
from gt_trainer.placement.kept_plan import PLAN_FILE
from gt_trainer.placement.masks_of_parts import make_masks_of_parts
from gt_trainer.placement.memory_budget import (
    adds_up_gradients,
    asked_budget_bytes,
    loss_bytes,
    memory_budget,
)
from gt_trainer.placement.plan_judge import judge_of, note_judgement
from gt_trainer.placement.planned_machine import planned_machine
from gt_trainer.placement.planned_mesh import (
    batch_layout,
    expert_layouts,
    expert_token_layouts,
    num_batch_shards,
    planned_mesh,
    token_layout,
)
from gt_trainer.placement.reasons import reasons_of_dry_run


def place_decoder(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    solver: AutoParallelConfig,
    dump_folder: str,
) -> Decoder:
    """Plan ``model`` and place it, in place.

    Rank 0 logs the plan as a table, and writes it to ``placement.json`` and ``placement.html`` in
    the dump folder.

    Args:
        model: a torchtitan decoder on the meta device, not placed yet.
        parallel_dims: torchtitan's meshes; their axes are planned.
        training: gives batch and sequence lengths, and the mixed-precision dtypes.
        solver: limits of the solver, or the file of a plan.
        dump_folder: for the two files.

    Raises:
        PlacementError: the model cannot be planned, no plan keeps the memory budget, the plan of
            the file is not for this run, or the dump folder cannot be written to.
    """
    mesh = planned_mesh(parallel_dims)
    blocks = expert_blocks(model)

    def published_plan() -> PlacementPlan:
        plan = placement_plan(
            model,
            MeshShape.of(mesh),
            blocks,
            training=training,
            solver=solver,
            judge=judge_of(parallel_dims, mesh) if solver.simulate_rivals else None,
        )
        _publish(plan, Path(dump_folder))
        note_judgement(plan.judgement)
        return plan

    shared = plan_on_first_rank(
        published_plan,
        device=titan_utils.device_type,
        cost_model=planned_machine().cost_model(),
    )
    place_by_plan(model, mesh, blocks, shared)
    return model


def place_by_plan(
    model: Decoder, mesh: DeviceMesh, blocks: dict[str, TitanExpertBlock], shared: SharedPlan
) -> None:
    """Place a decoder on the planned mesh by a plan.

    Raises:
        PlacementError: the plan is not of this model.
    """
    apply_plan(model, shared.plan, mesh, experts=blocks, interface=shared.interface)
    if num_batch_shards(MeshShape.of(mesh)) > 1:
        make_masks_of_parts(model)
    draw_whole_weights(model)


def placement_plan(
    model: Decoder,
    mesh: MeshShape,
    blocks: dict[str, TitanExpertBlock],
    *,
    training: TrainingConfig,
    solver: AutoParallelConfig,
    judge: Judge | None = None,
) -> PlacementPlan:
    """The plan of a decoder on a mesh, with batches as torchtitan's data loaders give them.

    It is searched for, and with a ``judge`` the fastest of it and its rivals is taken; or it is
    read from ``solver.plan`` and seen to be for this run.
    """
    num_shards = num_batch_shards(mesh)
    inputs = example_inputs(training, num_shards)
    kwargs = example_kwargs(model, training, num_shards)
    compute_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    constraints = demands_of_run(
        solver.experts, mesh, seq_len=training.seq_len, has_experts=bool(blocks)
    )
    budget = memory_budget(solver)
    of_loss = decoder_loss_bytes(model, training, mesh)
    accumulates = adds_up_gradients(mesh, training)
    cost_model = planned_machine().cost_model()
    logger.info(f"Placement: {budget}, of which the loss takes {of_loss / 2**30:.2f} GiB")
    with uncounted_routing(model):
        if solver.plan is not None:
            logger.info(f"Placement: the plan of {solver.plan}")
            return load_plan(
                solver.plan,
                model,
                mesh,
                inputs,
                example_kwargs=kwargs,
                cost_model=cost_model,
                constraints=constraints,
                memory_budget_bytes=budget.num_bytes,
                made_for_budget_bytes=asked_budget_bytes(solver),
                loss_bytes=of_loss,
                accumulates_gradients=accumulates,
                compute_dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                experts=blocks,
                device=titan_utils.device_type,
            )
        return find_placement(
            model,
            mesh,
            inputs,
            PlacementRequest(
                constraints=constraints,
                memory_budget_bytes=budget.num_bytes,
                loss_bytes=of_loss,
                accumulates_gradients=accumulates,
                cost_model=cost_model,
                compute_dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                experts=blocks,
                device=titan_utils.device_type,
                relative_gap=solver.relative_gap,
                time_limit_seconds=solver.time_limit_seconds,
                judge=judge,
                progress=lambda line: logger.info(f"Placement: {line}"),
            ),
            example_kwargs=kwargs,
        )


def decoder_loss_bytes(model: Decoder, training: TrainingConfig, mesh: MeshShape) -> int:
    """``loss_bytes`` of a whole decoder's batch."""
    return loss_bytes(
        mesh,
        training,
        num_samples=training.local_batch_size,
        vocab_size=model.config.vocab_size,
    )


def demands_of_run(
    experts: ExpertPlacement, mesh: MeshShape, *, seq_len: int, has_experts: bool
) -> Constraints:
    """What a plan must keep to be trained with: where data loaders have batches, the loss tokens.

    And, in a model with routed experts, how tokens are counted that balance their routing.
    """
    layout = batch_layout(mesh)
    return Constraints(
        inputs={"*": layout},
        outputs={"output": token_layout(mesh, seq_len)},
        experts=expert_layouts(experts, mesh),
        expert_tokens=expert_token_layouts(mesh) if has_experts else {},
    )


def _publish(plan: PlacementPlan, folder: Path) -> None:
    logger.info(f"Placement:\n{plan_report(plan)}")
    write_plan(plan, folder / PLAN_FILE)
    reasons = reasons_of_dry_run(plan)
    page = write_report_page(plan, folder / "placement.html", reasons=reasons)
    logger.info(f"Placement: the plan as a page is {page}")
