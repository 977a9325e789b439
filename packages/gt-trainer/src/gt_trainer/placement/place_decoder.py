"""Plan a decoder on the run's mesh and apply the plan: what ``parallelize`` does with a solver.

Rank 0 plans, publishes the plan, and the others get it, so that all ranks have the same one and
only one of them pays for it. A failure of rank 0 is raised on every rank.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

from gt_autoparallel import (
    Constraints,
    ModelInterface,
    PlacementError,
    PlacementPlan,
    PlacementPrices,
    PlacementRequest,
    apply_plan,
    decode_plan,
    encode_plan,
    find_placement,
    plan_report,
    write_plan,
    write_report_page,
)
from gt_config import AutoParallelConfig
from gt_trainer.decoder.initialization import draw_whole_weights
from gt_trainer.placement.example_batch import example_inputs, example_kwargs
from gt_trainer.placement.expert_blocks import TitanExpertBlock, expert_blocks, uncounted_routing
from gt_trainer.placement.masks_of_parts import make_masks_of_parts
from gt_trainer.placement.planned_mesh import (
    batch_layout,
    expert_layouts,
    num_batch_shards,
    planned_mesh,
)

_GIB = 2**30


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
        solver: limits of the solver.
        dump_folder: for the two files.

    Raises:
        PlacementError: the model cannot be planned, no plan keeps the memory budget, or the dump
            folder cannot be written to.
    """
    mesh = planned_mesh(parallel_dims)
    blocks = expert_blocks(model)
    shared = _plan_of_first_rank(
        model, mesh, blocks, training=training, solver=solver, folder=Path(dump_folder)
    )
    apply_plan(model, shared.plan, mesh, experts=blocks, interface=shared.interface)
    if num_batch_shards(mesh) > 1:
        make_masks_of_parts(model)
    draw_whole_weights(model)
    return model


def placement_plan(
    model: Decoder,
    mesh: DeviceMesh,
    blocks: dict[str, TitanExpertBlock],
    *,
    training: TrainingConfig,
    solver: AutoParallelConfig,
) -> PlacementPlan:
    """The plan of a decoder on a mesh, with batches as torchtitan's data loaders give them."""
    layout = batch_layout(mesh)
    with uncounted_routing(model):
        return find_placement(
            model,
            mesh,
            example_inputs(training, num_batch_shards(mesh)),
            PlacementRequest(
                constraints=Constraints(
                    inputs={"*": layout},
                    outputs={"output": layout},
                    experts=expert_layouts(solver.experts, mesh),
                ),
                memory_budget_bytes=_memory_budget_bytes(solver),
                compute_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
                reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
                experts=blocks,
                device=titan_utils.device_type,
                relative_gap=solver.relative_gap,
                time_limit_seconds=solver.time_limit_seconds,
                progress=lambda line: logger.info(f"Placement: {line}"),
            ),
            example_kwargs=example_kwargs(model, training, num_batch_shards(mesh)),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SharedPlan:
    plan: PlacementPlan
    interface: ModelInterface


def _plan_of_first_rank(
    model: Decoder,
    mesh: DeviceMesh,
    blocks: dict[str, TitanExpertBlock],
    *,
    training: TrainingConfig,
    solver: AutoParallelConfig,
    folder: Path,
) -> _SharedPlan:
    """The plan of rank 0, on every rank; rank 0 has published it to ``folder`` before.

    Raises:
        PlacementError: as on rank 0; any other failure there, too, in words.
    """
    sent: list[Any] = [None]
    plan: PlacementPlan | None = None
    if dist.get_rank() == 0:
        try:
            plan = placement_plan(model, mesh, blocks, training=training, solver=solver)
            _publish(plan, folder)
            sent = [(encode_plan(plan), plan.graph.interface)]
        except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for it
            sent = [_failure(error)]
    dist.broadcast_object_list(sent, src=0, device=torch.device(titan_utils.device_type))
    (received,) = sent
    if isinstance(received, PlacementError):
        raise received
    content, interface = received
    if plan is None:
        plan = decode_plan(content, PlacementPrices())
    return _SharedPlan(plan=plan, interface=interface)


def _failure(error: Exception) -> PlacementError:
    """What can be sent to other ranks: errors of the planner as they are, others in words."""
    if isinstance(error, PlacementError):
        return error
    failure = PlacementError(f"planning failed on rank 0: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _publish(plan: PlacementPlan, folder: Path) -> None:
    logger.info(f"Placement:\n{plan_report(plan)}")
    write_plan(plan, folder / "placement.json")
    page = write_report_page(plan, folder / "placement.html")
    logger.info(f"Placement: the plan as a page is {page}")


def _memory_budget_bytes(solver: AutoParallelConfig) -> int | None:
    """What the user allows; else what the device has; on a CPU, no limit."""
    if solver.memory_budget_gib is not None:
        return int(solver.memory_budget_gib * _GIB)
    if titan_utils.device_type == "cpu":
        return None
    return int(titan_utils.device_module.get_device_properties().total_memory)
