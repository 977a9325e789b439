"""What simulations of recipes hold: no less than bounds, about as much as guesses, over time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gt_passes.simulation import h100_sxm
from gt_trainer.device import intended_for
from gt_trainer.models.llama3 import llama3_8b, llama3_debugmodel
from gt_trainer.planning.candidates import MEMORY_POLICIES
from gt_trainer.planning.counted_model import counted_model
from gt_trainer.planning.guesses import guessed_bytes
from gt_trainer.planning.planner import PipelineLayouts
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.simulate_recipes import recipe_config, simulate_recipes
from gt_trainer.planning.step_bounds import step_bound

_SHARDED = RunRecipe(dp_shard=4, microbatch=2, global_batch=16, memory_policy="save_all")
_PIPELINE = RunRecipe(
    dp_shard=2, pp=2, schedule="1F1B", microbatch=1, global_batch=8, memory_policy="selective"
)


@pytest.mark.parametrize(
    "recipe",
    [
        _SHARDED,
        replace(_SHARDED, dp_shard=2, tp=2, memory_policy="full_recompute"),
        replace(_SHARDED, reduces_once=True),
        _PIPELINE,
        replace(_PIPELINE, schedule="ZBVZeroBubble", memory_policy="full_recompute"),
    ],
    ids=str,
)
def test_a_step_holds_its_bound_at_least_and_over_time_its_peak_at_most(recipe: RunRecipe) -> None:
    machine = h100_sxm()
    with intended_for("cuda"):
        config = llama3_debugmodel()
        model = counted_model(config)
        planned = recipe_config(config, recipe)
    ((outcome,),) = simulate_recipes({recipe: planned}, [machine])
    assert isinstance(outcome, RecipeOutcome)
    bound = step_bound(recipe, model, PipelineLayouts(model).of(recipe), machine)
    assert bound.peak_bytes <= outcome.peak_bytes
    assert bound.step_us <= outcome.step_us
    over_step = outcome.memory_over_step
    assert max(each.num_bytes for each in over_step.moments) == outcome.peak_bytes
    starts = [each.start_us for each in over_step.moments]
    assert starts == sorted(starts)
    assert starts[-1] <= over_step.end_us
    # The activations of a forward are there in the middle, and not at either end.
    activations = [each.held["activations"] for each in over_step.moments]
    assert max(activations) > max(activations[0], activations[-1])


@pytest.mark.parametrize("policy", MEMORY_POLICIES)
def test_layers_keep_what_is_guessed_of_their_policy(policy: str) -> None:
    """Four layers of Llama 3 8B on four sequences: most of the peak is what they keep."""
    machine = h100_sxm()
    with intended_for("cuda"):
        config = llama3_8b()
        spec = config.model_spec
        assert spec is not None
        layers = spec.model.layers[:4]
        config.model_spec = replace(spec, model=replace(spec.model, layers=layers))
        model = counted_model(config)
        recipe = RunRecipe(dp_shard=64, microbatch=4, global_batch=256, memory_policy=policy)
        planned = recipe_config(config, recipe)
    ((outcome,),) = simulate_recipes({recipe: planned}, [machine])
    assert isinstance(outcome, RecipeOutcome)
    layout = PipelineLayouts(model).of(recipe)
    guessed = guessed_bytes(recipe, model, layout, step_bound(recipe, model, layout, machine))
    assert guessed == pytest.approx(outcome.peak_bytes, rel=0.15)
