"""The recipes of a plan for any module, and what a run by one of them needs.

``mode_of``, ``mesh_of`` and ``passes_of`` are what the plan itself uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gt_config import CompileConfig, MemoryPolicy
from gt_config.graph_kinds import GraphKind
from gt_passes import GraphPass, default_passes
from gt_trace.fsdp import ShardingMode
from gt_trainer.planning.candidates import MEMORY_POLICIES
from gt_trainer.planning.placed_module import MESH_AXES, MODULE
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.staged_module import ModuleStages


def mode_of(recipe: RunRecipe) -> ShardingMode:
    """How ``gt_trace.fsdp.shard`` shares the parameters of a model by a recipe.

    Raises:
        ValueError: it has tensor parallelism, and shares them by its placement.
    """
    if recipe.tp > 1:
        raise ValueError(f"{recipe} is not run by shard, but by {how_to_share(recipe)}")
    if recipe.dp_shard == 1:
        return "replicate"
    return "shard" if recipe.dp_replicate == 1 else "hybrid_shard"


def how_to_share(recipe: RunRecipe) -> str:
    """The call by which all ranks of a run share the model, on ``mesh_of`` the recipe."""
    if recipe.tp > 1:
        return "apply_plan(ModuleWithLoss(model, loss), plan.placements[recipe], mesh)"
    if recipe.pp > 1:
        return f'shard(stage, mesh["shard"], mode={mode_of(recipe)!r}) of each stage'
    return f"shard(model, mesh, mode={mode_of(recipe)!r})"


def mesh_of(recipe: RunRecipe, device_type: str) -> DeviceMesh:
    """The mesh over which it does; all ranks call this."""
    if recipe.tp > 1:
        return init_device_mesh(device_type, (recipe.dp_shard, recipe.tp), mesh_dim_names=MESH_AXES)
    if recipe.pp > 1:
        sizes = (recipe.pp, recipe.dp_shard)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "shard"))
    names = {"replicate": recipe.dp_replicate, "shard": recipe.dp_shard}
    axes = {name: size for name, size in names.items() if mode_of(recipe) in (name, "hybrid_shard")}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def passes_of(
    recipe: RunRecipe, *, layers: str = "layers.*", graph: GraphKind = "STEP"
) -> tuple[GraphPass, ...]:
    """The passes of a recipe, for ``gt_passes.optimize`` or a stage's transform.

    Args:
        recipe: says the memory policy.
        layers: pattern of the names of the modules that are layers, in the module itself.
        graph: the kind of graph.
    """
    if recipe.tp > 1:
        layers = f"{MODULE}.{layers}"
    options = CompileConfig(memory_policy=cast("MemoryPolicy", recipe.memory_policy))
    return tuple(_with_layers(each, layers) for each in default_passes(options, graph=graph))


def _with_layers(graph_pass: Any, layers: str) -> Any:
    has_layers = any(field.name == "layers" for field in fields(graph_pass))
    return replace(graph_pass, layers=layers) if has_layers else graph_pass


def recipes_by_hand(
    microbatch: int, num_gpus: int, num_microbatches: int, gpus_per_domain: int
) -> Iterator[RunRecipe]:
    """Data-parallel ranks alone: replicas, shards, and both, with each policy."""
    shards = {1: None, num_gpus: None}
    if num_gpus > gpus_per_domain > 1 and num_gpus % gpus_per_domain == 0:
        shards[gpus_per_domain] = None
    for dp_shard in shards:
        for policy in MEMORY_POLICIES:
            yield RunRecipe(
                dp_replicate=num_gpus // dp_shard,
                dp_shard=dp_shard,
                microbatch=microbatch,
                global_batch=microbatch * num_microbatches * num_gpus,
                memory_policy=policy,
            )


def placed_recipe(by_hand: RunRecipe, degree: int) -> RunRecipe:
    """As many samples for as many GPUs, ``degree`` of which share theirs."""
    return replace(
        by_hand,
        dp_replicate=1,
        dp_shard=by_hand.num_gpus // degree,
        tp=degree,
        microbatch=by_hand.microbatch * degree,
        memory_policy="save_all",  # what runs again is in the placement
    )


def staged_recipes(by_hand: RunRecipe, stages: ModuleStages) -> Iterator[RunRecipe]:
    """As many samples for as many GPUs, in pipelines, with each schedule and each policy."""
    for degree in dict.fromkeys(stages.degrees):
        for schedule in dict.fromkeys(stages.schedules):
            for policy in MEMORY_POLICIES:
                yield replace(
                    by_hand,
                    dp_replicate=1,
                    dp_shard=by_hand.num_gpus // degree,
                    pp=degree,
                    schedule=schedule,
                    memory_policy=policy,
                )
