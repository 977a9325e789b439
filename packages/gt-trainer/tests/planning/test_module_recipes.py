"""Recipes of a module: which there are, and what a run needs of them."""

from __future__ import annotations

import pytest

from gt_config import CompileConfig
from gt_passes import default_passes
from gt_trainer.dry_run.fake_step import fake_ranks
from gt_trainer.planning.candidates import MEMORY_POLICIES
from gt_trainer.planning.module_recipes import (
    how_to_share,
    mesh_of,
    mode_of,
    passes_of,
    placed_recipe,
    recipes_by_hand,
    staged_recipes,
)
from gt_trainer.planning.staged_module import ModuleStages


def test_replicas_of_nodes_are_looked_at_where_there_are_several():
    shards = {(e.dp_replicate, e.dp_shard): mode_of(e) for e in recipes_by_hand(1, 64, 1, 8)}
    assert shards == {(64, 1): "replicate", (1, 64): "shard", (8, 8): "hybrid_shard"}
    assert {each.dp_shard for each in recipes_by_hand(1, 4, 1, 8)} == {1, 4}


def test_the_passes_of_a_recipe_are_the_default_ones_with_its_policy_and_layers():
    recipe = next(each for each in recipes_by_hand(1, 4, 1, 8) if each.memory_policy == "selective")
    options = CompileConfig(memory_policy="selective")
    assert passes_of(recipe) == default_passes(options, graph="STEP")
    named = {getattr(each, "layers", "blocks.*") for each in passes_of(recipe, layers="blocks.*")}
    assert named == {"blocks.*"}


def test_what_a_placed_recipe_is_run_with():
    by_hand = next(recipes_by_hand(1, 8, 1, 8))
    recipe = placed_recipe(by_hand, 2)
    assert (recipe.num_gpus, recipe.num_microbatches) == (8, by_hand.num_microbatches)
    assert recipe.global_batch == by_hand.global_batch
    with fake_ranks(8):
        mesh = mesh_of(recipe, "cpu")
        assert (mesh.mesh_dim_names, mesh.shape) == (("data", "model"), (4, 2))
    named = {getattr(each, "layers", None) for each in passes_of(recipe, layers="blocks.*")}
    assert named == {None, "module.blocks.*"}
    with pytest.raises(ValueError, match=r"is not run by shard, but by apply_plan\("):
        mode_of(recipe)


def test_recipes_of_pipelines_have_as_many_samples_on_as_many_gpus():
    by_hand = next(recipes_by_hand(2, 8, 3, 8))
    stages = ModuleStages(degrees=(2, 4, 2), loss_of=lambda output: output)
    found = list(staged_recipes(by_hand, stages))
    assert len(found) == 2 * 2 * len(MEMORY_POLICIES)
    for recipe in found:
        assert (recipe.num_gpus, recipe.global_batch) == (8, by_hand.global_batch)
        assert recipe.num_microbatches == 3 * recipe.pp
    first = found[0]
    with fake_ranks(8):
        mesh = mesh_of(first, "cpu")
        assert (mesh.mesh_dim_names, mesh.shape) == (("pp", "shard"), (2, 4))
    assert how_to_share(first) == "shard(stage, mesh[\"shard\"], mode='shard') of each stage"
    options = CompileConfig(memory_policy=first.memory_policy)
    for graph in ("STAGE", "UNSHARD", "FORWARD"):
        assert passes_of(first, graph=graph) == default_passes(options, graph=graph)
