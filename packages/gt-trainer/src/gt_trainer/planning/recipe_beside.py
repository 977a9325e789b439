"""The recipe that a user has already, read from its flags, to be simulated beside a plan's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gt_config import ConfigError
from gt_pipeline.errors import GtPipelineError
from gt_trainer.planning.candidates import NoRecipeError, PlanRequest
from gt_trainer.planning.model_counts import ModelCounts
from gt_trainer.planning.pipeline_layouts import PipelineLayouts
from gt_trainer.planning.recipe_config import recipe_config, with_values
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.preflight.preflight import topology_of
from gt_trainer.trainer import GraphTrainer

_SHARDS = "--parallelism.data_parallel_shard_degree"
_REST = -1


def recipe_beside(
    base: GraphTrainer.Config,
    values: Mapping[str, object],
    request: PlanRequest,
    model: ModelCounts,
    *,
    asked: Collection[str] = (),
) -> RunRecipe:
    """The recipe that ``base`` has with these values, on the GPUs and with the batch of a request.

    Args:
        base: says what ``values`` does not. Not changed.
        values: by flag.
        request: what is planned.
        model: its counts.
        asked: as for ``recipe_config``.

    Raises:
        NoRecipeError: no recipe of a plan has these values, or no run can; lists what is wrong.
    """
    recipe = _recipe_of(with_values(base, values), request)
    problems = list(_differences(recipe, values))
    if recipe.num_gpus != request.num_gpus:
        problems.append(f"its degrees are of {recipe.num_gpus:,} GPUs, not {request.num_gpus:,}")
    try:
        recipe_config(base, recipe, asked=asked)
        PipelineLayouts(model).of(recipe)
    except (ConfigError, GtPipelineError) as error:
        problems.append(str(error))
    if problems:
        listed = "\n  ".join(problem.replace("\n", "\n  ") for problem in problems)
        raise NoRecipeError(f"--beside names no recipe of this plan:\n  {listed}")
    return recipe


def _recipe_of(config: GraphTrainer.Config, request: PlanRequest) -> RunRecipe:
    mesh = topology_of(config, request.num_gpus)
    is_pipelined = mesh.pp > 1
    linears = config.quantization.linears
    return RunRecipe(
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        cp=mesh.cp,
        tp=mesh.tp,
        ep=mesh.ep,
        pp=mesh.pp,
        schedule=config.parallelism.pipeline_parallel_schedule if is_pipelined else None,
        microbatch=mesh.microbatch_size if is_pipelined else mesh.batch_size,
        global_batch=request.global_batch,
        memory_policy=config.compile.memory_policy,
        ep_overlap=config.compile.ep_overlap.enabled,
        reduces_once=config.compile.accumulation == "reduce_once",
        linears=linears,
        skipped=request.skipped if linears != "none" else (),
    )


def _differences(recipe: RunRecipe, values: Mapping[str, object]) -> Iterator[str]:
    settings = recipe.settings()
    for flag, value in values.items():
        if (flag, value) == (_SHARDS, _REST):
            continue
        if flag not in settings:
            yield f"{flag} is {value!r}, and changes nothing with the other flags"
        elif settings[flag] != value:
            yield f"{flag} is {value!r}, and a recipe with the other flags has {settings[flag]!r}"
