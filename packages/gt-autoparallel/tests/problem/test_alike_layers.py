"""Alike layers may be placed, and recompute, differently: counted plans, and what bounds them."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from plan_doubles import S0
from planned_models import MESH, Stack

from gt_autoparallel.audit import audit_plan
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.problem.alike_layers import crossing_nodes, members_by_layer
from gt_autoparallel.problem.constraints import Constraints, ResolvedRequest, resolve_constraints
from gt_autoparallel.problem.requested_memory import requested_memory
from gt_autoparallel.solver import evaluate_mixture, solve_mixed

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


def request(share: float) -> ResolvedRequest:
    return ResolvedRequest(
        constraints=resolve_constraints(FROM_LOADER, planner().graph, MESH),
        memory_budget_bytes=budget(share),
    )


def test_a_block_is_what_the_layers_in_between_have_for_themselves() -> None:
    placement = planner().problem(request(0.6))
    (block,) = placement.problem.blocks
    # The first and the last layer have other neighbors, and are alike to no other.
    assert block.size == 6
    names = {placement.problem.variables[number].name for number in block.variables}
    assert "layers.1.up/mm" in names
    assert not {name for name in names if "layers.1/add" in name}
    windows = {placement.problem.windows[number].name for number in block.windows}
    assert windows == {"layers.1 forward", "layers.1 backward", "layers.1 optimizer"}
    rows = [placement.problem.memory[row].name for row in block.passing_bytes]
    moments = ["backward", "backward, first layer", "backward, last layer"]
    moments += [f"{moment}, reduction" for moment in moments]
    assert rows == [f"layers.1 {moment}" for moment in moments]
    assert all(any(each.any() for each in passing) for passing in block.passing_bytes.values())


def test_members_of_the_backward_stand_in_the_order_of_their_layers() -> None:
    graph = planner().graph
    placement = planner().problem(request(0.6))
    (block,) = placement.problem.blocks
    for number in block.variables:
        members = members_by_layer(graph, placement.clustering)[number]
        layers = [graph.nodes[index].module.split(".")[1] for index in members]
        assert layers == ["1", "2", "3", "4", "5", "6"], graph.nodes[members[0]].name


def test_without_a_budget_nothing_is_counted() -> None:
    assert planner().problem(ResolvedRequest()).problem.blocks == ()


def test_what_crosses_layers_is_treated_alike() -> None:
    names = {planner().graph.nodes[index].name for index in crossing_nodes(planner().graph)}
    assert {"layers.3/add/share", "layers.4/add"} <= names
    assert not {name for name in names if name.endswith(("silu", "up/mm"))}


@pytest.mark.parametrize("share", [0.85, 0.6])
def test_a_plan_is_what_its_mixture_is(share: float) -> None:
    counted = plan(share, 0.02)
    placement = planner().problem(counted.request)
    mixture = placement.mixture_of(counted.options, counted.recomputed)
    assert placement.options_of_nodes(mixture) == counted.options
    assert placement.recomputed_nodes(mixture) == counted.recomputed
    assert mixture.objective_us == pytest.approx(counted.objective_us, rel=1e-9)
    assert max(mixture.memory_bytes) == pytest.approx(counted.memory.total, rel=1e-9)
    assert evaluate_mixture(placement.problem, mixture.choices) == mixture


def test_no_mixture_takes_more_than_its_rows_say() -> None:
    counted = plan(0.6, 0.02)
    placement = planner().problem(counted.request)
    problem = placement.problem
    (block,) = problem.blocks
    # What layers do in the plan, and that they run nothing again.
    known = [
        placement.mixture_of(counted.options, counted.recomputed).choices,
        placement.mixture_of(counted.options).choices,
    ]
    rng, sizes = random.Random(0), set()
    for _ in range(40):
        taken = list(known[0])
        for thing in range(block.size):
            of, origin = rng.choice(known), rng.randrange(block.size)
            for variable in block.variables:
                things = list(taken[variable])
                things[thing] = of[variable][origin]
                taken[variable] = tuple(things)
        mixture = evaluate_mixture(problem, taken)
        memory = requested_memory(
            placement.graph,
            placement.options_of_nodes(mixture),
            MESH,
            counted.request,
            recomputed=placement.recomputed_nodes(mixture),
        )
        assert memory.total <= max(mixture.memory_bytes) + 1e-3
        sizes.add(memory.total)
    assert len(sizes) > 5


@pytest.mark.parametrize("share", [pytest.param(0.85, marks=pytest.mark.slow), 0.6])
def test_counted_layers_cost_no_more_than_alike_ones_and_keep_the_budget(share: float) -> None:
    alike, counted = plan(share, 0.0), plan(share, 0.02)
    assert counted.objective_us <= alike.objective_us * (1 + 1e-9)
    assert counted.memory.total <= budget(share)
    assert counted.solver.lower_bound_us <= counted.objective_us
    assert counted.solver.proven
    assert audit_plan(counted).relative_error < 1e-9


def test_the_bound_of_mixtures_is_below_that_of_alike_layers() -> None:
    placement = planner().problem(request(0.6))
    found = solve_mixed(placement.problem, relative_gap=1e-6, time_limit_seconds=60.0)
    assert found.mixture is not None
    assert 0 < found.lower_bound_us <= found.mixture.objective_us
    # Counting gains something: the gap of layers that all do the same is wider.
    assert found.mixture.objective_us <= plan(0.6, 0.0).objective_us * (1 + 1e-9)
