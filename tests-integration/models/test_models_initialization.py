"""The initial weights of a run are those of its seed, however many ranks share them."""

import models.initialization_cases as cases
import pytest
import torch
from torch.distributed.tensor import Shard

from gt_autoparallel import PlacementPrices, read_plan

FSDP = {"data_parallel_shard_degree": 4}
FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
HSDP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
FSDP_EP = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}
TP_EP = {**FSDP_TP, "expert_parallel_degree": 4}


@pytest.mark.parametrize(
    ("module", "config", "degrees"),
    [
        ("llama3", "llama3_debugmodel", FSDP),
        ("llama3", "llama3_debugmodel", FSDP_TP),
        ("llama3", "llama3_debugmodel", HSDP),
        ("qwen3", "qwen3_debugmodel", FSDP_TP),
        ("deepseek_v3", "deepseek_v3_debugmodel", FSDP_EP),
        ("deepseek_v3", "deepseek_v3_debugmodel", TP_EP),
    ],
    ids=["FSDP", "FSDP x TP", "HSDP", "tied, FSDP x TP", "FSDP x EP", "FSDP x TP x EP"],
)
def test_four_ranks_start_from_the_weights_of_one(one, four, module, config, degrees):
    (alone,) = one.run(cases.initial_weights, module, config, {})
    for together in four.run(cases.initial_weights, module, config, degrees):
        assert list(together) == list(alone)
        for name, weight in together.items():
            assert torch.equal(weight, alone[name]), name


def test_four_ranks_of_a_placed_model_start_from_the_weights_of_one(one, four, tmp_path):
    (alone,) = one.run(cases.initial_weights, "llama3", "llama3_debugmodel", {})
    together = four.run(
        cases.initial_weights, "llama3", "llama3_debugmodel", FSDP_TP, str(tmp_path)
    )
    plan = read_plan(tmp_path / "placement.json", prices=PlacementPrices())
    # The order matters in which the axes cut what both of them shard.
    assert (Shard(0), Shard(0)) in plan.parameter_layouts().values()
    for weights in together:
        assert list(weights) == list(alone)
        for name, weight in weights.items():
            assert torch.equal(weight, alone[name]), name


def test_a_sharded_weight_is_not_one_block_repeated(four):
    weights = four.run(cases.initial_weights, "llama3", "llama3_debugmodel", FSDP)[0]
    first, second, *_ = weights["lm_head.weight"].chunk(4)
    assert not torch.equal(first, second)


def test_tied_weights_are_drawn_once_and_by_the_projection(one):
    (weights,) = one.run(cases.initial_weights, "qwen3", "qwen3_debugmodel", {})
    assert "lm_head.weight" not in weights
    assert weights["tok_embeddings.weight"].std() == pytest.approx(0.02, rel=0.05)
