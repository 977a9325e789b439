"""A user's own recipe, read from values by flag, or refused with everything that is wrong."""

import pytest

from gt_trainer.device import intended_for
from gt_trainer.models.llama3 import llama3_8b
from gt_trainer.planning.candidates import NoRecipeError, PlanRequest, candidates
from gt_trainer.planning.counted_model import counted_model
from gt_trainer.planning.recipe_beside import recipe_beside
from gt_trainer.planning.run_recipe import RunRecipe

_PARALLELISM = "--parallelism."
_TP = f"{_PARALLELISM}tensor_parallel_degree"
_PP = f"{_PARALLELISM}pipeline_parallel_degree"
_SHARDS = f"{_PARALLELISM}data_parallel_shard_degree"
_SCHEDULE = f"{_PARALLELISM}pipeline_parallel_schedule"
_BATCH = "--training.local_batch_size"


@pytest.fixture(scope="module")
def config():
    with intended_for("cuda"):
        return llama3_8b()


@pytest.fixture(scope="module")
def model(config):
    return counted_model(config)


@pytest.fixture(scope="module")
def request_of_plan():
    return PlanRequest(num_gpus=8, global_batch=16, gpus_per_node=8, fixed={})


def test_what_is_not_said_is_as_the_configuration_has_it(config, model, request_of_plan):
    values = {_TP: 2, _SHARDS: -1, _BATCH: 2, "--compile.memory_policy": "full_recompute"}
    with intended_for("cuda"):
        assert recipe_beside(config, values, request_of_plan, model) == RunRecipe(
            dp_shard=4, tp=2, microbatch=2, global_batch=16, memory_policy="full_recompute"
        )


def test_the_settings_of_a_candidate_are_that_candidate(config, model, request_of_plan):
    pipelines = (each for each in candidates(request_of_plan, model) if each.pp == 4)
    recipe = next(each for each in pipelines if each.schedule == "Interleaved1F1B")
    with intended_for("cuda"):
        assert recipe_beside(config, recipe.settings(), request_of_plan, model) == recipe


def test_everything_that_is_wrong_is_told_at_once(config, model, request_of_plan):
    values = {_TP: 3, _SHARDS: 2, _SCHEDULE: "1F1B", "--training.global_batch_size": 7}
    with intended_for("cuda"), pytest.raises(NoRecipeError) as raised:
        recipe_beside(config, values, request_of_plan, model)
    assert str(raised.value) == (
        "--beside names no recipe of this plan:\n"
        "  --parallelism.pipeline_parallel_schedule is '1F1B', and changes nothing with the other "
        "flags\n"
        "  --training.global_batch_size is 7, and a recipe with the other flags has 16\n"
        "  its degrees are of 6 GPUs, not 8\n"
        "  the configuration has 2 problems:\n"
        "    1. --training.seq_len is 8192\n"
        "       allowed: a multiple of 3 (tp 3)\n"
        "       fix: use 8193, or smaller degrees\n"
        "    2. --parallelism.tensor_parallel_degree is 3\n"
        "       allowed: a divisor of the model's n_heads 32\n"
        "       fix: use one of 1, 2, 4, 8, 16, 32"
    )


def test_a_pipeline_runs_the_whole_batch_of_a_rank_at_once(config, model, request_of_plan):
    with intended_for("cuda"), pytest.raises(NoRecipeError) as raised:
        recipe_beside(config, {_PP: 2, _BATCH: 1}, request_of_plan, model)
    assert str(raised.value) == (
        "--beside names no recipe of this plan:\n"
        "  --training.local_batch_size is 1, and a recipe with the other flags has 8"
    )
