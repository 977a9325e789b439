"""Which recipes are looked at, and what is said where there is none."""

import random
from dataclasses import replace

import pytest
from planning.small_problems import small_model

from gt_trainer.planning.candidates import NoRecipeError, PlanRequest, candidates
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.plan_run import check_possible, nearest_batch

_DENSE = next(m for seed in range(9) if (m := small_model(random.Random(seed))).num_experts is None)


def _request(num_gpus=8, global_batch=16, **fixed):
    return PlanRequest(num_gpus=num_gpus, global_batch=global_batch, gpus_per_node=8, fixed=fixed)


def test_recipes_use_all_gpus_and_the_whole_batch_and_come_once():
    recipes = list(candidates(_request(), _DENSE))
    assert len(set(recipes)) == len(recipes) > 100
    assert {each.num_gpus for each in recipes} == {8}
    for each in recipes:
        ranks = each.dp_replicate * each.dp_shard
        assert each.num_microbatches * each.microbatch * ranks == 16


def test_every_kind_of_recipe_is_among_them():
    recipes = list(candidates(_request(), _DENSE))
    assert {each.schedule for each in recipes} == {
        None,
        "1F1B",
        "Interleaved1F1B",
        "ZBVZeroBubble",
        "DualPipeV",
    }
    assert {each.memory_policy for each in recipes} == {
        "save_all",
        "selective",
        "selective_alternate",
        "full_recompute",
    }
    assert {each.reduces_once for each in recipes} == {False, True}
    assert {each.tp for each in recipes} == {1, 2, 4, 8}
    assert {each.cp for each in recipes} == {1, 2, 4, 8}


def test_experts_add_their_degree_and_overlap():
    model = next(m for s in range(9) if (m := small_model(random.Random(s))).num_experts)
    recipes = list(candidates(_request(), model))
    assert {each.ep for each in recipes} >= {1, 2, 4}
    assert {each.ep_overlap for each in recipes if each.ep > 1} == {False, True}
    assert {each.ep_overlap for each in recipes if each.ep == 1} == {False}


def test_products_in_8_bits_leave_out_what_is_skipped():
    request = replace(_request(), linears=("none", "float8_rowwise"), skipped=("lm_head",))
    of_linears = {each.linears: each.settings() for each in candidates(request, _DENSE)}
    assert of_linears["float8_rowwise"]["--quantization.skip"] == ("lm_head",)
    assert "--quantization.skip" not in of_linears["none"]


def test_what_was_asked_for_holds_for_every_recipe():
    fixed = {"--parallelism.tensor_parallel_degree": 4, "--compile.memory_policy": "selective"}
    recipes = list(candidates(_request(**fixed), _DENSE))
    assert {(each.tp, each.memory_policy) for each in recipes} == {(4, "selective")}


def test_a_batch_that_cannot_be_divided_is_told_with_the_nearest():
    # No stage is without a layer, and heads do not divide by 13.
    request = _request(num_gpus=13, global_batch=16)
    assert nearest_batch(request, _DENSE) == 13
    with pytest.raises(NoRecipeError) as raised:
        check_possible(request, _DENSE, load_cluster("h100_sxm"))
    assert str(raised.value) == (
        "no degrees divide 16 sequences a step among 13 GPUs: the nearest batch that can be "
        f"divided is --global-batch-tokens {13 * _DENSE.seq_len}"
    )


def test_flags_that_no_recipe_has_are_named():
    request = _request(**{"--parallelism.tensor_parallel_degree": 3})
    with pytest.raises(NoRecipeError) as raised:
        check_possible(request, _DENSE, load_cluster("h100_sxm"))
    assert str(raised.value) == (
        "no recipe for 8 GPUs and 16 sequences a step has --parallelism.tensor_parallel_degree 3: "
        "leave one of these flags out"
    )


def test_a_model_larger_than_the_cluster_is_told_how_many_gpus_might_do():
    tiny = load_cluster("h100_sxm").with_relaxed({"memory": _DENSE.num_parameters * 16 / 32 / 1e9})
    with pytest.raises(NoRecipeError, match=r"the model does not fit: .* such GPUs might"):
        check_possible(_request(), _DENSE, tiny)
