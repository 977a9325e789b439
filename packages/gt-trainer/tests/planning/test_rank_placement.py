"""Which axis of a recipe lies on which links."""

import pytest
from torchtitan.distributed import ParallelDims

from gt_trainer.dry_run.fake_step import fake_ranks
from gt_trainer.planning.rank_placement import rank_placement
from gt_trainer.planning.run_recipe import RunRecipe


def _recipe(**degrees):
    return RunRecipe(microbatch=1, global_batch=64, memory_policy="selective", **degrees)


def test_neighbors_share_a_domain_and_what_is_apart_uses_nics():
    recipe = _recipe(tp=4, dp_shard=4, pp=2, schedule="1F1B")
    assert [str(each) for each in rank_placement(recipe, gpus_per_domain=8)] == [
        "tp 4: neighbors, all over NVLink",
        "fsdp 4: each 4 ranks apart, up to 2 in each of 2 NVLink domains, over NVLink and NICs",
        "pp 2: each 16 ranks apart, one in each of 2 NVLink domains, over NICs",
    ]


def test_experts_are_sharded_over_neighbors():
    first, *_ = rank_placement(_recipe(dp_shard=32, ep=16), gpus_per_domain=8)
    assert str(first) == (
        "ep 16: neighbors, up to 8 in each of 2 NVLink domains, over NVLink and NICs"
    )


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "cp": 2, "dp_shard": 2, "dp_replicate": 2, "pp": 2, "schedule": "1F1B"},
        {"tp": 2, "dp_shard": 8, "ep": 4},
    ],
)
def test_groups_are_those_of_torchtitans_mesh(degrees):
    recipe = _recipe(**degrees)
    placed = rank_placement(recipe, gpus_per_domain=8)
    expected = {each.axis: [i * each.stride for i in range(each.size)] for each in placed}
    with fake_ranks(recipe.num_gpus):
        dims = ParallelDims(**recipe.degrees, world_size=recipe.num_gpus)
        dims.build_mesh()
        found = {}
        for axis in expected:
            names = [name for name in ("dp_shard", "cp") if getattr(dims, name) > 1]
            mesh = dims.get_mesh(names if axis == "fsdp" else axis)
            found[axis] = mesh.mesh.flatten().tolist()
    assert found == expected


def test_the_widest_group_is_told_where_they_differ():
    (fsdp, replicas) = rank_placement(_recipe(dp_shard=48, dp_replicate=3), gpus_per_domain=72)
    assert (fsdp.num_domains, fsdp.most_in_a_domain) == (2, 24)
    assert str(replicas) == (
        "dp_replicate 3: each 48 ranks apart, up to 2 in each of 2 NVLink domains, over NVLink "
        "and NICs"
    )


def test_parameters_are_sharded_over_context_parallelism_too():
    texts = [str(each) for each in rank_placement(_recipe(dp_shard=8, cp=8), gpus_per_domain=8)]
    assert texts == [
        "cp 8: neighbors, all over NVLink",
        "fsdp 64: neighbors, up to 8 in each of 8 NVLink domains, over NVLink and NICs",
    ]
