"""Experts' plans are what their names say, and none is cheaper than the planner's own."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from plan_doubles import S0, S1, R
from planned_models import NormedBlock
from torch import nn

from gt_autoparallel.expert_table import ExpertPlan, expert_plans, expert_table
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.axis_styles import expert_styles, pinned_constraints
from gt_autoparallel.problem.tensor_parallel_names import TensorParallelNames

BATCH, TOKENS, WIDTH = 8, 64, 256
NAMES = TensorParallelNames(columns=("layers.*.up.weight",), rows=("layers.*.down.weight",))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NormedBlock(WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def planner(*sizes: int) -> Planner:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(BATCH, TOKENS, WIDTH)
    return planner_of_model(model, MeshShape(names=("dp", "tp")[: len(sizes)], sizes=sizes), (x,))


@cache
def experts() -> dict[str, PlacementPlan]:
    return {each.name: each.plan for each in expert_plans(planner(4), names=NAMES) if each.plan}


def launches(plan: PlacementPlan) -> Counter[tuple[str, str]]:
    return Counter((each.purpose, each.kind) for each in predicted_collectives(plan))


def test_ddp_reduces_every_gradient_and_nothing_else():
    plan = experts()["DDP"]
    assert set(plan.parameter_layouts().values()) == {(R,)}
    assert launches(plan) == {("reduce gradient", "all_reduce"): 6}


def test_fsdp_gathers_every_parameter_once_and_scatters_its_gradient():
    plan = experts()["FSDP"]
    assert set(plan.parameter_layouts().values()) == {(S0,)}
    counts = launches(plan)
    assert counts["unshard", "all_gather"] == 6
    assert counts["reduce gradient", "reduce_scatter"] == 6
    assert counts.total() == 12


def test_tensor_parallelism_sums_activations_once_a_block_and_phase():
    layouts = experts()["TP"].parameter_layouts()
    assert layouts["layers.0.up.weight"] == (S0,)
    assert layouts["layers.0.down.weight"] == (S1,)
    assert layouts["layers.0.norm.weight"] == (R,)
    counts = launches(experts()["TP"])
    # Two blocks forward, and backward into the input of each but that of the first.
    assert sum(n for (purpose, _), n in counts.items() if purpose == "activation") >= 3


def test_sequence_parallelism_takes_less_memory_than_tensor_parallelism():
    plain, sequence = experts()["TP"], experts()["TP + SP"]
    assert sequence.memory.saved_activations < plain.memory.saved_activations
    assert sequence.parameter_layouts() == plain.parameter_layouts()


def test_no_expert_is_cheaper_than_the_planner():
    plan = planner(4).find()
    assert plan.solver.proven
    for name, expert in experts().items():
        assert plan.objective_us <= expert.objective_us * (1 + 1e-9), name
    table = expert_table(plan, [ExpertPlan(name=n, plan=p) for n, p in experts().items()])
    assert table.splitlines()[0] == "simulated, on dp 4"
    assert "DDP" in table
    assert "1.000x" in table.splitlines()[1]


def test_styles_combine_on_two_axes():
    styles = expert_styles(planner(2, 2).mesh)
    assert list(styles) == [
        "DDP",
        "FSDP",
        "DDP + TP",
        "DDP + TP + SP",
        "FSDP + TP",
        "FSDP + TP + SP",
    ]
    pins = pinned_constraints(
        planner(2, 2).graph, planner(2, 2).mesh, styles["FSDP + TP"], names=NAMES
    )
    of_node = {pin.node: pin.placements for pin in pins}
    assert of_node["layers.0.up.weight"] == (S1, S0)
    assert of_node["layers.0.up.weight/share"] == (R, S0)
    assert of_node["layers.0.down.weight"] == (S0, S1)
    assert of_node["layers.0.norm.weight"] == (S0, R)
    assert of_node["x"] == (S0, R)
    assert of_node["layers.0/add/share"] == (S0, R)


def test_what_cannot_be_cut_is_replicated():
    mesh = MeshShape(names=("dp",), sizes=(3,))
    pins = pinned_constraints(planner(4).graph, mesh, {"dp": "fsdp"})
    of_node = {pin.node: pin.placements for pin in pins}
    assert of_node["layers.0.up.weight"] == (R,)
    assert "x" not in of_node


def test_unknown_axes_are_refused():
    with pytest.raises(ValueError, match=r"styles are for axes \['pp'\]; the mesh has \['dp'\]"):
        pinned_constraints(planner(4).graph, planner(4).mesh, {"pp": "ddp"})


def test_names_of_torchtitan_and_hugging_face_are_known():
    names = TensorParallelNames()
    assert names.dim_of("layers.0.attention.wq.weight") == 0
    assert names.dim_of("layers.0.attention.wo.weight") == 1
    assert names.dim_of("model.layers.3.mlp.down_proj.weight") == 1
    assert names.dim_of("model.layers.3.self_attn.v_proj.weight") == 0
    assert names.dim_of("tok_embeddings.weight") == 0
    assert names.dim_of("layers.0.attention_norm.weight") is None


def test_a_plan_that_is_impossible_says_so():
    plan = experts()["DDP"]
    table = expert_table(plan, [ExpertPlan(name="TP", plan=None, impossible="too wide")])
    assert table.splitlines()[-1] == "TP: too wide"
