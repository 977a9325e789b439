"""Published recipes are candidates of a plan, and no bound is above what was measured.

A plan of the same model, cluster and batch, which knows no recipe, finds one that takes no longer.
The published run is simulated beside it, whatever its bounds say.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from gt_passes import simulation
from gt_trainer.command_line.command_line import flags_given
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.command_line.plan_command import split_overrides
from gt_trainer.device import intended_for
from gt_trainer.models.adapt import with_positions
from gt_trainer.models.published_runs import PUBLISHED_RUNS, PublishedRun
from gt_trainer.planning.candidates import PlanRequest, candidates
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.counted_model import counted_model
from gt_trainer.planning.plan_run import PlanQuestion, make_plan
from gt_trainer.planning.planner import PipelineLayouts
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_beside import RunBeside, recipe_of
from gt_trainer.planning.step_bounds import step_bound
from gt_trainer.trainer import GraphTrainer

# One of each kind: the others differ in what no bound knows.
_RUNS = (
    "llama3_8b_8_fsdp",
    "llama3_8b_128_fsdp_compiled_float8",
    "llama3_8b_64k",
    "llama3_70b_fsdp_tp",
    "llama3_405b_1f1b",
    "llama3_405b_interleaved",
)


def configuration(run: PublishedRun) -> GraphTrainer.Config:
    with intended_for("cuda"):
        module = importlib.import_module(f"gt_trainer.models.{run.module}")
        config = getattr(module, run.config)()
        if run.positions is not None:
            config = with_positions(config, run.positions)
        return apply_overrides(config, run.flags)


@pytest.mark.parametrize("name", _RUNS)
def test_a_published_recipe_is_a_candidate_whose_bounds_are_below_what_was_measured(
    name: str,
) -> None:
    run = PUBLISHED_RUNS[name]
    config = configuration(run)
    recipe = recipe_of(config, run.world_size)
    model = counted_model(config)
    request = PlanRequest(
        num_gpus=run.world_size,
        global_batch=recipe.global_batch,
        gpus_per_node=8,
        linears=(recipe.linears,),
        skipped=recipe.skipped,
        fixed={},
    )
    assert recipe in set(candidates(request, model))
    hardware = getattr(simulation, run.hardware)()
    bound = step_bound(recipe, model, PipelineLayouts(model).of(recipe), hardware)
    assert bound.peak_bytes < hardware.hbm_capacity_bytes
    tokens = recipe.global_batch * model.seq_len
    measured_us = 1e6 * tokens / run.tokens_per_second_per_gpu / run.world_size
    assert 0.4 * measured_us < bound.step_us < measured_us


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_RUNS)
def test_a_free_plan_finds_a_recipe_that_takes_no_longer_than_the_published_one(name: str) -> None:
    run = PUBLISHED_RUNS[name]
    config = configuration(run)
    recipe = recipe_of(config, run.world_size)
    _, further = split_overrides(run.flags)
    base, asked = configuration(replace(run, flags=further)), flags_given(further)
    with intended_for("cuda"):
        question = PlanQuestion(
            cluster=load_cluster(run.hardware),
            num_gpus=run.world_size,
            global_batch_tokens=recipe.global_batch * base.training.seq_len,
            minutes=30,
            enough=1,
            what_if={},
            fixed={},
            beside=RunBeside(flags=run.flags, asked=flags_given(run.flags), config=config),
            model_flags="",
        )
        answer = make_plan(base, question, asked=asked, tell=print)
    assert answer.plan.failures == ()
    assert answer.beside is not None
    published = answer.beside.result
    assert isinstance(published, RecipeOutcome), published
    best = answer.ranked[0]
    print(f"{name}: {best.step_us:,.0f} us by {best.recipe}, {published.step_us:,.0f} by {recipe}")
    assert best.step_us <= published.step_us
    model = counted_model(base)
    bound = step_bound(recipe, model, PipelineLayouts(model).of(recipe), answer.plan.machines[0])
    assert bound.step_us <= published.step_us
    assert bound.peak_bytes <= published.peak_bytes
