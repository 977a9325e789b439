"""The audit passes plans that run nodes again, and notices whatever is changed in that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plan_doubles import S0
from planned_models import MESH, Stack

from gt_autoparallel.audit.plan_audit import audit_plan, examined
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.problem.constraints import Constraints


@pytest.fixture(scope="module")
def plan() -> PlacementPlan:
    with torch.device("meta"):
        planner = planner_of_model(Stack(3, 256), MESH, (torch.empty(4096, 256),))
    constraints = Constraints(inputs={"x": [S0]}, outputs={"output": [S0]})
    free = planner.find(constraints=constraints)
    budget = round(0.5 * free.memory.total)
    return planner.find(constraints=constraints, memory_budget_bytes=budget, audit=False)


def problems(plan: PlacementPlan) -> str:
    return "\n".join(examined(plan, None)[0])


def index(plan: PlacementPlan, name: str) -> int:
    return next(node.index for node in plan.graph.nodes if node.name == name)


def with_again(plan: PlacementPlan, *names: str) -> PlacementPlan:
    more = {index(plan, name) for name in names}
    return replace(plan, recomputed=tuple(sorted({*plan.recomputed, *more})))


def test_a_plan_that_is_right_passes(plan: PlacementPlan) -> None:
    assert audit_plan(plan).relative_error < 1e-9
    assert plan.memory.recomputed > 0
    assert any(each.again for each in plan.redistributions)


def test_what_runs_again_must_be_paid_for(plan: PlacementPlan) -> None:
    without_one = (
        problems(replace(plan, recomputed=tuple(i for i in plan.recomputed if i != computed)))
        for computed in plan.recomputed
        if plan.compute_us[computed] > 0
    )
    found = next(each for each in without_one if "nothing in the backward reads it" not in each)
    assert "window 'layers." in found
    assert "saved activations take" in found
    assert "recomputed take" in found or "the plan costs" in found


def test_second_redistributions_are_those_of_what_runs_again(plan: PlacementPlan) -> None:
    first = tuple(each for each in plan.redistributions if not each.again)
    found = problems(replace(plan, redistributions=first))
    assert "not lead" in found or "communicates" in found or "operand 0 of node" in found
    twice = next(each for each in plan.redistributions if not each.again
                 and each.use.consumer not in plan.recomputed)  # fmt: skip
    more = (*plan.redistributions, replace(twice, again=True))
    found = problems(replace(plan, redistributions=more))
    assert f"node {twice.use.consumer} has no operand {twice.use.position} to redistribute" in found
    assert "a second time" in found


def test_the_second_gathering_is_in_the_window_of_the_backward(plan: PlacementPlan) -> None:
    moved = tuple(
        replace(each, window=each.window.replace("backward", "forward"))
        if each.again and each.window
        else each
        for each in plan.redistributions
    )
    assert "planned in 'layers." in problems(replace(plan, redistributions=moved))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.0/add", "outside of its layer reads it"),
        ("layers.1.up.weight", "it is no computation of the forward"),
        ("layers.1.up/grad/mm", "it is no computation of the forward"),
    ],
)
def test_notices_what_must_not_run_again(name: str, reason: str, plan: PlacementPlan) -> None:
    found = problems(with_again(plan, name))
    assert f"node {name!r} runs again, though" in found
    assert reason in found


def test_notices_that_the_memory_is_another(plan: PlacementPlan) -> None:
    memory = replace(plan.memory, recomputed=plan.memory.recomputed + 4)
    assert "recomputed take" in problems(replace(plan, memory=memory))


def test_what_runs_again_is_a_list_of_nodes_in_order(plan: PlacementPlan) -> None:
    for wrong in (plan.recomputed[::-1], (*plan.recomputed, plan.recomputed[-1]), (10**6,)):
        assert "is not a list of nodes in order" in problems(replace(plan, recomputed=wrong))
