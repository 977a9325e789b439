"""Alike layers may be placed, and recompute, differently: counted plans, and what bounds them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from plan_doubles import S0, R
from planned_models import MESH, Block, Stack
from torch import nn

from gt_autoparallel import planner as planner_module
from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import AuditError
from gt_autoparallel.find import planner_of_model
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.prices.recomputability import recomputable_nodes
from gt_autoparallel.problem.constraints import Constraints, ResolvedRequest, resolve_constraints
from gt_autoparallel.problem.problem_of_graph import PlacementProblem, crossing_nodes
from gt_autoparallel.problem.requested_memory import requested_memory
from gt_autoparallel.solver import (
    MemoryBudgetError,
    Mixture,
    WarmStart,
    evaluate_mixture,
    solve_mixed,
)
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.mixed_search import MixedSolution
from gt_autoparallel.solver.mixtures import alike_mixture
from gt_autoparallel.solver.problem import Problem
from gt_autoparallel.solver.solution import MemoryShortage

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
        members = placement.clustering.members[number]
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


def random_mixtures(
    problem: Problem, known: Sequence[Sequence[tuple[int, ...]]]
) -> Iterator[Mixture]:
    """Of what layers do in some mixtures; what they have in common is that of the last one."""
    rng = random.Random(0)
    for _ in range(40):
        taken = list(known[-1])
        for block in problem.blocks:
            for thing in range(block.size):
                of, origin = rng.choice(known), rng.randrange(block.size)
                for variable in block.variables:
                    things = list(taken[variable])
                    things[thing] = of[variable][origin]
                    taken[variable] = tuple(things)
        mixture = evaluate_mixture(problem, taken)
        assert mixture.objective_us < math.inf
        yield mixture


def account_of(
    placement: PlacementProblem, mixture: Mixture, request: ResolvedRequest
) -> MemoryBreakdown:
    return requested_memory(
        placement.graph,
        placement.options_of_nodes(mixture),
        MESH,
        request,
        recomputed=placement.recomputed_nodes(mixture),
    )


def test_no_mixture_takes_more_than_its_rows_say() -> None:
    counted = plan(0.6, 0.02)
    placement = planner().problem(counted.request)
    # What layers do in the plan, and that they run nothing again.
    known = [
        placement.mixture_of(counted.options).choices,
        placement.mixture_of(counted.options, counted.recomputed).choices,
    ]
    sizes = set()
    for mixture in random_mixtures(placement.problem, known):
        memory = account_of(placement, mixture, counted.request)
        assert memory.total <= max(mixture.memory_bytes) + 1e-3
        sizes.add(memory.total)
    assert len(sizes) > 5


def test_layers_that_give_back_least_stand_first_and_in_another_order_rows_say_too_little() -> None:
    """Of a stack whose gradients are as large as what it saves, in part less, in part more."""
    with torch.device("meta"):
        whole = planner_of_model(Stack(8, 256), MESH, (torch.empty(512, 256),))
    replicated = replace(FROM_LOADER, parameters={"*": [R]})
    free = whole.find(constraints=replicated)
    request = ResolvedRequest(
        constraints=resolve_constraints(replicated, whole.graph, MESH), memory_budget_bytes=2**40
    )
    placement = whole.problem(request)
    graph = whole.graph
    everything = [
        node
        for node in sorted(recomputable_nodes(graph))
        if not is_view_like(graph.nodes[node])
        or free.layout(graph.nodes[node].operands[0]) != free.options[node].operands[0]
    ]
    known = [
        placement.mixture_of(free.options).choices,
        placement.mixture_of(free.options, everything).choices,
    ]
    in_turn = reversed_exceed = 0
    most_first = replace(placement, given_back=tuple(-each for each in placement.given_back))
    for mixture in random_mixtures(placement.problem, known):
        by_rows = max(mixture.memory_bytes) + 1e-3
        memory = account_of(placement, mixture, request)
        assert memory.total <= by_rows
        in_turn += memory.let_go_in_backward > 0
        reversed_exceed += account_of(most_first, mixture, request).total > by_rows
    assert in_turn > 5
    assert reversed_exceed > 20


class Alternating(nn.Module):
    """Wide and narrow layers, one of each in turn; narrow ones come before all others and last."""

    def __init__(self) -> None:
        super().__init__()
        wide = [number in (2, 4, 6) for number in range(9)]
        self.layers = nn.ModuleList([Block(256) if each else Narrow(256, 32) for each in wide])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Narrow(Block):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


@pytest.mark.parametrize("tokens", [32, 64])
def test_of_kinds_of_layers_that_alternate_rows_count_no_less_than_a_plan_takes(
    tokens: int,
) -> None:
    """The fullest moment is the turn of the first wide layer, between narrow ones."""
    with torch.device("meta"):
        mixed = planner_of_model(Alternating(), MESH, (torch.empty(tokens, 256),))
    replicated = replace(FROM_LOADER, parameters={"*": [R]})
    request = ResolvedRequest(
        constraints=resolve_constraints(replicated, mixed.graph, MESH), memory_budget_bytes=2**40
    )
    placement = mixed.problem(request)
    assert [block.size for block in placement.problem.blocks] == [4, 3]
    options = mixed.find(constraints=replicated).options
    memory = requested_memory(mixed.graph, options, MESH, request, recomputed=())
    assert min(memory.let_go_in_backward, memory.to_come_in_backward) > 0
    by_rows = max(evaluate(placement.problem, placement.solution_of(options)).memory_bytes)
    assert memory.total <= by_rows <= 1.05 * memory.total


@pytest.mark.parametrize("runs", [(7, 6, 5, 4, 3, 2, 1, 0), (3, 0, 6, 1, 7, 2, 5, 4)])
def test_what_layers_are_called_changes_nothing(runs: tuple[int, ...]) -> None:
    with torch.device("meta"):
        shuffled = planner_of_model(Stack(8, 256, runs=runs), MESH, (torch.empty(4096, 256),))
    found = shuffled.find(
        constraints=FROM_LOADER, memory_budget_bytes=budget(0.6), relative_gap=0.02
    )
    straight = plan(0.6, 0.02)
    assert found.memory == straight.memory
    assert found.objective_us == pytest.approx(straight.objective_us, rel=1e-9)
    assert audit_plan(found).relative_error < 1e-9
    again, wanted = (
        Counter(int(each.graph.nodes[node].module.split(".")[1]) for node in each.recomputed)
        for each in (found, straight)
    )
    assert again == {runs[layer]: count for layer, count in wanted.items()}


def test_of_layers_that_run_twice_everything_counts_at_any_moment() -> None:
    with torch.device("meta"):
        looped = planner_of_model(Stack(2, 256, runs=(0, 1, 0, 1)), MESH, (torch.empty(2048, 256),))
    free = looped.find(constraints=FROM_LOADER)
    allowed = round(0.8 * free.memory.total)
    found = looped.find(constraints=FROM_LOADER, memory_budget_bytes=allowed)
    assert found.recomputed
    assert (found.memory.let_go_in_backward, found.memory.to_come_in_backward) == (0, 0)
    assert found.memory.to_come_at_reduction == 0
    assert found.memory.in_flight > 0
    assert audit_plan(found).relative_error < 1e-9
    placement = looped.problem(found.request)
    choices = placement.solution_of(found.options, found.recomputed)
    by_rows = evaluate(placement.problem, choices).memory_bytes
    assert max(by_rows) == pytest.approx(found.memory.total, rel=1e-9)


@pytest.mark.parametrize("share", [pytest.param(0.85, marks=pytest.mark.slow), 0.6])
def test_counted_layers_cost_no_more_than_alike_ones_and_keep_the_budget(share: float) -> None:
    alike, counted = plan(share, 0.0), plan(share, 0.02)
    assert counted.objective_us <= alike.objective_us * (1 + 1e-9)
    assert counted.memory.total <= budget(share)
    assert counted.solver.lower_bound_us <= counted.objective_us
    assert counted.solver.proven
    assert audit_plan(counted).relative_error < 1e-9


@pytest.mark.parametrize(("below_us", "is_searched"), [(math.inf, True), (1e9, False)])
def test_layers_that_do_the_same_are_looked_for_where_a_mixture_is_not_proven(
    monkeypatch: pytest.MonkeyPatch, below_us: float, is_searched: bool
) -> None:
    found: list[MixedSolution] = []

    def dear(problem: Problem, **further: Any) -> MixedSolution:
        """Where the search begins, as if nothing better were found in that time."""
        start: WarmStart = further["warm_start"]
        mixture = alike_mixture(problem, start.choices)
        found.append(
            MixedSolution(
                mixture=mixture,
                lower_bound_us=0.9 * mixture.objective_us,
                gap=0.1,
                seconds=0.0,
                memory_prices=(),
                warm_start=start,
            )
        )
        return found[-1]

    alike = plan(0.6, 0.0)
    monkeypatch.setattr("gt_autoparallel.planner.solve_mixed", dear)
    of_mixture = planner().find(
        constraints=FROM_LOADER,
        memory_budget_bytes=budget(0.6),
        relative_gap=0.01,
        below_us=below_us,
    )
    begun_at = found[-1].mixture
    assert begun_at is not None
    assert of_mixture.memory.total <= budget(0.6)
    assert of_mixture.solver.lower_bound_us == found[-1].lower_bound_us
    assert not of_mixture.solver.proven
    if is_searched:
        assert of_mixture.objective_us < begun_at.objective_us
        assert of_mixture.objective_us <= alike.objective_us * 1.01
    else:
        assert of_mixture.objective_us == pytest.approx(begun_at.objective_us)


def test_a_mixture_stays_where_layers_that_do_the_same_keep_no_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = planner_module.solve

    def none_below(problem: Problem, **further: Any) -> Any:
        if further.get("most_parts", math.inf) < math.inf:
            raise MemoryBudgetError(
                "",
                shortages=(
                    MemoryShortage(
                        row="a row",
                        budget_bytes=1.0,
                        minimum_bytes=2.0,
                        choices=(0,) * len(problem.variables),
                    ),
                ),
                jointly=False,
                frugal=(0,) * len(problem.variables),
            )
        return original(problem, **further)

    def unproven(*args: Any, **further: Any) -> MixedSolution:
        return replace(solve_mixed(*args, **further), gap=1.0)

    mixture = plan(0.6, 0.02)
    monkeypatch.setattr(planner_module, "solve", none_below)
    monkeypatch.setattr(planner_module, "solve_mixed", unproven)
    found = planner().find(
        constraints=FROM_LOADER, memory_budget_bytes=budget(0.6), relative_gap=0.02
    )
    assert found.objective_us == pytest.approx(mixture.objective_us, rel=0.02)
    assert not found.solver.proven


@pytest.mark.parametrize("number", [1, 3])
def test_what_one_layer_runs_again_costs_others_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A norm's square reads what the layer before made: all layers in between share its choice. Of
    # layer 3 it is not the first one's, as layers 1 and 2 give back less, and come first.
    counted, nodes = plan(0.6, 0.02), planner().graph.nodes
    names = {f"layers.{number}.norm/{name}" for name in ("pow", "mean", "add", "rsqrt")}
    names |= {f"layers.{each}/silu" for each in range(1, number)}
    recomputed = {*counted.recomputed, *(node.index for node in nodes if node.name in names)}
    # What the first layer does with it is what all of them do in the mixture.
    (square,) = (node.index for node in nodes if node.name == "layers.1.norm/pow")
    placements: list[PlacementProblem] = []
    searched: list[MixedSolution] = []
    original = Planner.problem

    def noting(self: Planner, *args: Any, **further: Any) -> PlacementProblem:
        placements.append(original(self, *args, **further))
        return placements[-1]

    def running_more(*args: Any, **further: Any) -> MixedSolution:
        mixture = placements[-1].mixture_of(counted.options, {*recomputed, square})
        assert len(placements[-1].chosen_again(mixture)) == len(recomputed) + 5
        searched.append(replace(solve_mixed(*args, **further), mixture=mixture))
        return searched[-1]

    monkeypatch.setattr(Planner, "problem", noting)
    monkeypatch.setattr(planner_module, "solve_mixed", running_more)
    found = planner().find(
        constraints=FROM_LOADER, memory_budget_bytes=budget(0.6), relative_gap=0.02
    )
    (solved,) = searched
    assert solved.mixture is not None
    assert len(found.recomputed) == len(recomputed)
    assert found.solver.objective_us == pytest.approx(found.objective_us, rel=1e-9)
    assert found.objective_us < solved.mixture.objective_us - 10.0
    assert found.solver.lower_bound_us == solved.lower_bound_us


def test_a_bound_above_the_plan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_high(*args: Any, **further: Any) -> MixedSolution:
        solved = solve_mixed(*args, **further)
        return replace(solved, lower_bound_us=1.5 * solved.lower_bound_us)

    monkeypatch.setattr(planner_module, "solve_mixed", too_high)
    with pytest.raises(AuditError, match="less than the lower bound"):
        planner().find(constraints=FROM_LOADER, memory_budget_bytes=budget(0.6), relative_gap=0.02)


def test_the_bound_of_mixtures_is_below_that_of_alike_layers() -> None:
    placement = planner().problem(request(0.6))
    found = solve_mixed(placement.problem, relative_gap=1e-6, time_limit_seconds=60.0)
    assert found.mixture is not None
    assert 0 < found.lower_bound_us <= found.mixture.objective_us
    # Counting gains something: the gap of layers that all do the same is wider.
    assert found.mixture.objective_us <= plan(0.6, 0.0).objective_us * (1 + 1e-9)
