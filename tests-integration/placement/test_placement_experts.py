"""No expert's plan of torchtitan's models is cheaper than the planner's; prints their tables.

On meta tensors in this process: planning needs neither ranks nor memory. Times are simulated.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torchtitan.tools import utils as titan_utils

from gt_autoparallel import (
    Constraints,
    MeshShape,
    expert_plans,
    expert_table,
    planner_of_model,
    predicted_collectives,
)
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.axis_styles import expert_styles
from gt_trainer.decoder.attention import attention_mask_for
from gt_trainer.models import deepseek_v3, llama3, qwen3
from gt_trainer.placement.expert_blocks import expert_blocks, uncounted_routing

BATCH, TOKENS = 8, 256
CONFIGS = {
    "llama3": llama3.llama3_debugmodel,
    "qwen3": qwen3.qwen3_debugmodel,
    "qwen3_moe": qwen3.qwen3_moe_debugmodel,
    "deepseek_v3": deepseek_v3.deepseek_v3_debugmodel,
}
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")
MESHES = {
    "1-D": MeshShape(names=("data",), sizes=(4,)),
    "2-D": MeshShape(names=("data", "model"), sizes=(2, 2)),
}


def planner(
    name: str, mesh: MeshShape, num_layers: int, *, expert_width: int | None = None
) -> Planner:
    """Of the first layers of a debug model, in bfloat16; its experts may be of another width."""
    configuration: Any = CONFIGS[name]()
    model_config = configuration.model_spec.model
    model_config.layers = [
        copy.deepcopy(model_config.layers[number]) for number in range(num_layers)
    ]
    if expert_width is not None:
        for layer in model_config.layers:
            layer.moe.routed_experts.inner_experts.hidden_dim = expert_width
    configuration.training.seq_len = TOKENS
    model_config.update_from_config(config=configuration)
    with torch.device("meta"), titan_utils.set_default_dtype(torch.float32):
        model = model_config.build()
    tokens, positions = (torch.empty(BATCH, TOKENS, dtype=torch.int64, device="meta") for _ in "tp")
    blocks = expert_blocks(model)
    with uncounted_routing(model):
        return planner_of_model(
            model,
            mesh,
            (tokens,),
            example_kwargs={
                "positions": positions,
                "attention_masks": attention_mask_for(model, positions),
            },
            compute_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            experts=blocks,
        )


def compare_with_experts(name: str, mesh: MeshShape, num_layers: int) -> None:
    """Whatever gap the planner is allowed: here, and in gt-train, it is no optimum that is found."""
    asked = planner(name, mesh, num_layers)
    plan = asked.find(relative_gap=1e-2, time_limit_seconds=600)
    experts = list(expert_plans(asked, relative_gap=1e-2))
    print(f"\n{name}, {num_layers} layers: {expert_table(plan, experts)}")
    has_experts = name in WITH_EXPERTS
    assert [each.name for each in experts] == list(expert_styles(mesh, routed_experts=has_experts))
    assert plan.solver.proven
    for each in experts:
        assert each.plan is not None, f"{each.name}: {each.impossible}"
        assert plan.solver.lower_bound_us <= each.plan.objective_us, each.name
        assert plan.objective_us <= each.plan.objective_us * (1 + 1e-9), each.name


def test_llama3_on_one_axis():
    compare_with_experts("llama3", MESHES["1-D"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_on_every_mesh(name: str, mesh: str):
    compare_with_experts(name, MESHES[mesh], 2)


@pytest.mark.slow
def test_many_experts_are_distributed_though_nobody_asks_for_it():
    # Narrower experts, as the debug model has them, are gathered more cheaply than tokens travel.
    plan = planner("qwen3_moe", MESHES["1-D"], 2, expert_width=768).find(relative_gap=1e-2)
    exchanges = [c for c in predicted_collectives(plan) if c.purpose == "token exchange"]
    assert {c.module for c in exchanges} == {f"layers.{n}.moe.routed_experts" for n in range(2)}
    # Counts, tokens and results; and the gradients of both.
    assert len(exchanges) == 2 * 5


@pytest.mark.slow
def test_a_plan_keeps_the_batch_that_a_data_loader_gives():
    asked = planner("llama3", MESHES["2-D"], 2)
    layout = [Shard(0), None]
    plan = asked.find(constraints=Constraints(inputs={"*": layout}))
    for node in plan.graph.of_kind("input"):
        (given,) = plan.options[node.index].outputs
        assert given is not None
        assert given[0] == Shard(0)
    assert math.isfinite(plan.objective_us)
