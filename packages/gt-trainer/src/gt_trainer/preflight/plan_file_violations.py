"""What is wrong with the plan that a run would train with, before its ranks wait for one another.

All that can be told of a plan file without capturing the model: that it is whole, and made for this
model, mesh, batch and machine. Rank 0 captures the model, and sees the rest, when it places it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import apply_overrides
from torchtitan.tools import utils as titan_utils

from gt_config import Topology, Violation
from gt_trainer.placement.kept_plan import by_hand_file_of, plan_file_of
from gt_trainer.trainer import GraphTrainer

if TYPE_CHECKING:
    from gt_autoparallel import MeshShape

_PLAN = "--compile.autoparallel_solver.plan"


def plan_file_violations(config: GraphTrainer.Config, topology: Topology) -> Iterator[Violation]:
    """Yield at most one violation: why the plan of a file is not for this run.

    Args:
        config: of a run with which nothing else is wrong: its model is built, on meta.
        topology: its extents.
    """
    path = plan_file_of(config)
    if path is None:
        yield from _by_hand_violations(config, topology.world)
        return
    problem = plan_problem(path, config, topology)
    if problem is None:
        return
    if config.compile.autoparallel_solver.plan is not None:
        yield Violation(
            flag=_PLAN,
            value=str(path),
            allowed="the file of a plan for this model, mesh, batch and machine",
            fix=f"{problem}\nGive another file, or leave the flag out to search for a plan",
        )
        return
    yield Violation(
        flag="--checkpoint.folder",
        value=str(path.parent),
        allowed=f"checkpoints whose plan, {path.name} beside them, is for this run",
        fix=f"{problem}\nGive back what differs, or {_PLAN} with another plan; or delete that "
        "file, and a plan is searched for",
    )


def plan_problem(path: Path, config: GraphTrainer.Config, topology: Topology) -> str | None:
    """Why the plan of a file is not for a run; None if it is, by all that costs no capture.

    Args:
        path: of the file.
        config: as for ``plan_file_violations``.
        topology: likewise.
    """
    # Imported here: no other run pays for the solver.
    from gt_autoparallel import PlacementError

    try:
        _check(path, config, topology)
    except (PlacementError, OSError) as error:
        return str(error)
    return None


def _by_hand_violations(config: GraphTrainer.Config, world_size: int) -> Iterator[Violation]:
    """Yield at most one: why a judgement that was kept does not hold for this run."""
    path = by_hand_file_of(config)
    if path is None:
        return
    from gt_trainer.placement.judged_run import judgement_for
    from gt_trainer.placement.pipeline_judgement import NoJudgementError

    try:
        judgement_for(path, config, world_size)
    except (NoJudgementError, OSError) as error:
        yield Violation(
            flag="--checkpoint.folder",
            value=str(path.parent),
            allowed=f"checkpoints whose judgement, {path.name} beside them, is for this run",
            fix=f"{error}\nGive back what differs, or delete that file, and plan and step by hand "
            "are compared again",
        )


def _check(path: Path, config: GraphTrainer.Config, topology: Topology) -> None:
    from torchtitan.models.common.moe import MoE

    from gt_autoparallel import check_plan_file
    from gt_trainer.placement.example_batch import example_inputs, example_kwargs
    from gt_trainer.placement.memory_budget import adds_up_gradients, asked_budget_bytes
    from gt_trainer.placement.place_decoder import decoder_loss_bytes, demands_of_run
    from gt_trainer.placement.planned_machine import planned_machine
    from gt_trainer.placement.planned_mesh import num_batch_shards, planned_axes

    mesh = planned_axes(
        dp_replicate=topology.dp_replicate,
        dp_shard=topology.dp_shard,
        tp=topology.tp,
        ep=topology.ep,
    )
    solver = config.compile.autoparallel_solver
    if config.parallelism.pipeline_parallel_degree > 1:
        _check_stages(path, config, mesh)
        return
    model = model_on_meta(config)
    routes = any(isinstance(module, MoE) for module in model.modules())
    num_shards = num_batch_shards(mesh)
    budget = asked_budget_bytes(solver)
    check_plan_file(
        path,
        model,
        mesh,
        example_inputs(config.training, num_shards),
        example_kwargs=example_kwargs(model, config.training, num_shards),
        cost_model=planned_machine().cost_model(),
        constraints=demands_of_run(
            solver.experts, mesh, seq_len=config.training.seq_len, has_experts=routes
        ),
        # Not what the device has: to ask CUDA would keep ranks from being forked.
        memory_budget_bytes=budget,
        made_for_budget_bytes=budget,
        loss_bytes=decoder_loss_bytes(model, config.training, mesh),
        accumulates_gradients=adds_up_gradients(mesh, config.training),
    )


def _check_stages(path: Path, config: GraphTrainer.Config, mesh: MeshShape) -> None:
    """See that the file has a plan for each stage."""
    from gt_autoparallel import check_plan_file
    from gt_trainer.parallelism_options import balance_of
    from gt_trainer.pipelines.pipeline_plan import pipeline_plan
    from gt_trainer.pipelines.planned_stages import (
        demands_of_stage,
        microbatches_of,
        stage_batch,
        stage_budget_bytes,
        stage_loss_bytes,
        stage_name,
        stages_of_plan,
    )
    from gt_trainer.pipelines.split_model import captured_plan, cut_stages
    from gt_trainer.placement.memory_budget import asked_budget_bytes
    from gt_trainer.placement.planned_machine import planned_machine

    if balance_of(config.parallelism) == "planned":
        names = stages_of_plan(path)
        named = dataclasses.replace(config.parallelism, module_fqns_per_model_part=names)
        config = dataclasses.replace(config, parallelism=named)
    parallelism, solver = config.parallelism, config.compile.autoparallel_solver
    model = model_on_meta(config)
    plan = captured_plan(
        pipeline_plan(
            parallelism,
            num_layers=len(model.layers),
            local_batch_size=config.training.local_batch_size,
        ),
        config.compile,
    )
    num_stages = plan.schedule.num_stages
    budget = asked_budget_bytes(solver)
    size = parallelism.pipeline_parallel_microbatch_size
    for index, part in cut_stages(model, plan, range(num_stages)).items():
        batch = stage_batch(part, index, config.training, mesh, microbatch_size=size)
        may_take = None
        if budget is not None:
            may_take = stage_budget_bytes(
                budget, part, index, plan, config.training, mesh, microbatch_size=size
            )
        check_plan_file(
            path,
            part,
            mesh,
            batch.inputs,
            example_kwargs=batch.kwargs,
            microbatches=microbatches_of(plan),
            part=stage_name(index),
            cost_model=planned_machine().cost_model(),
            constraints=demands_of_stage(
                part,
                index,
                experts=solver.experts,
                mesh=mesh,
                seq_len=config.training.seq_len,
                is_tied=model.enable_weight_tying,
            ),
            memory_budget_bytes=may_take,
            made_for_budget_bytes=may_take,
            loss_bytes=stage_loss_bytes(
                part, index, plan, config.training, mesh, microbatch_size=size
            ),
        )


def model_on_meta(config: GraphTrainer.Config) -> Any:
    """The model as torchtitan's trainer builds it, of a copy of its configuration."""
    own = copy.deepcopy(config)
    assert own.model_spec is not None
    own.model_spec.model.update_from_config(config=own)
    if own.override.imports:
        apply_overrides(own.override, own)
    dtype = TORCH_DTYPE_MAP[own.training.dtype]
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        return own.model_spec.model.build()
