"""Alike layers may recompute different values: counted plans, and the bound that holds for them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from plan_doubles import S0
from planned_models import MESH, Stack

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.constraints import Constraints, ResolvedRequest, resolve_constraints
from gt_autoparallel.problem.counted_layers import crossing_nodes, layer_groups
from gt_autoparallel.solver import relax, solve

FROM_LOADER = Constraints(inputs={"x": [S0]}, outputs={"output": [S0]})


@cache
def planner() -> Planner:
    with torch.device("meta"):
        return planner_of_model(Stack(8, 256), MESH, (torch.empty(4096, 256),))


def budget(share: float) -> int:
    return round(share * planner().find(constraints=FROM_LOADER).memory.total)


@cache
def plan(share: float, gap: float) -> PlacementPlan:
    return planner().find(
        constraints=FROM_LOADER, memory_budget_bytes=budget(share), relative_gap=gap
    )


def test_groups_double() -> None:
    shared = planner().problem(ResolvedRequest(memory_budget_bytes=2**40))
    groups = layer_groups(planner().graph, shared.clustering)
    # The first and the last layer have other neighbors, and are alike to no other.
    assert list(groups.values()) == [0, 0, 1, 2, 2, 3, 3, 0]


def test_what_crosses_layers_is_treated_alike() -> None:
    names = {planner().graph.nodes[index].name for index in crossing_nodes(planner().graph)}
    assert {"layers.3/add/share", "layers.4/add"} <= names
    assert not {name for name in names if name.endswith(("silu", "up/mm"))}


@pytest.mark.parametrize("share", [pytest.param(0.85, marks=pytest.mark.slow), 0.6])
def test_counted_layers_cost_no_more_than_alike_ones_and_keep_the_budget(share: float) -> None:
    alike, counted = plan(share, 0.0), plan(share, 0.02)
    assert counted.objective_us <= alike.objective_us * (1 + 1e-9)
    assert counted.memory.total <= budget(share)
    assert counted.solver.lower_bound_us <= counted.objective_us
    assert counted.solver.proven
    assert audit_plan(counted).relative_error < 1e-9


@pytest.mark.slow
def test_the_bound_is_below_the_best_mixture_of_every_placement_met() -> None:
    request = ResolvedRequest(
        constraints=resolve_constraints(FROM_LOADER, planner().graph, MESH),
        memory_budget_bytes=budget(0.6),
    )
    shared = planner().problem(request)
    bounded = relax(shared.problem, relative_gap=0.0, time_limit_seconds=60.0)
    assert 0 < bounded.lower_bound_us <= bounded.objective_us
    placements = {shared.options_of_nodes(bounded.choices), plan(0.6, 0.0).options}
    for options in placements:
        counted = planner().problem(request, counted=shared.clustering, options=options)
        best = solve(counted.problem)
        assert best.proven
        assert best.objective_us >= bounded.lower_bound_us * (1 - 1e-9)
        # Counting gains something: the gap of layers that all do the same is wider.
        assert best.objective_us <= plan(0.6, 0.0).objective_us * (1 + 1e-9)
