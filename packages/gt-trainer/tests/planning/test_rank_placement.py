"""Which axis of a recipe lies on which links."""

import pytest
import torch.distributed as dist
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
        "dp_shard 4: each 4 ranks apart, up to 2 in each of 2 NVLink domains, over NVLink and NICs",
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
def test_strides_are_those_of_torchtitans_mesh(degrees):
    recipe = _recipe(**degrees)
    expected = {each.axis: each.stride for each in rank_placement(recipe, gpus_per_domain=8)}
    with fake_ranks(recipe.num_gpus):
        dims = ParallelDims(**recipe.degrees, world_size=recipe.num_gpus)
        dims.build_mesh()
        found = {}
        for axis in expected:
            ranks = dist.get_process_group_ranks(dims.get_mesh(axis).get_group())
            found[axis] = ranks[1] - ranks[0]
    assert found == expected
