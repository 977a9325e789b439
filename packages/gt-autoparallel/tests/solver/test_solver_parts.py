"""The pieces of the solver, each against exhaustive search on problems that have few choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from random_problems import random_problem

from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import Elimination, SearchPart
from gt_autoparallel.solver.dominance import drop_dominated
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.incumbent import Incumbent
from gt_autoparallel.solver.message_passing import DualAscent, Prices
from gt_autoparallel.solver.price_model import PriceModel
from gt_autoparallel.solver.problem import Edge, Problem, Variable
from gt_autoparallel.solver.reduced_problem import ReducedProblem, reduce_problem
from gt_autoparallel.solver.search import branch

Choices = tuple[int, ...]


def reduced_of(problem: Problem) -> ReducedProblem | None:
    reduced = reduce_problem(problem)
    if make_arc_consistent(reduced) is not None:
        return None
    reduced.compact_links()
    return reduced


def problems(count: int) -> list[tuple[Problem, ReducedProblem]]:
    """Random problems of five variables, each with options that no forbidden pair excludes."""
    found = []
    for seed in itertools.count():
        problem = random_problem(seed, num_variables=5, max_options=3)
        reduced = reduced_of(problem)
        if reduced is not None:
            found.append((problem, reduced))
        if len(found) == count:
            return found
    raise AssertionError("unreachable")


def complete_problem(seed: int) -> Problem:
    """Four variables of three options, each pair of them connected: no order is narrow."""
    rng = np.random.default_rng(seed)
    return Problem(
        variables=tuple(
            Variable(
                name=str(index),
                cost_us=rng.random(3),
                window=None,
                window_compute_us=np.zeros(3),
                memory_bytes=(),
            )
            for index in range(4)
        ),
        edges=tuple(
            Edge(
                name=f"{left}-{right}",
                left=left,
                right=right,
                left_labels=np.arange(3),
                right_labels=np.arange(3),
                cost_us=rng.random((3, 3)),
                window=None,
                window_communication_us=np.zeros((3, 3)),
            )
            for left, right in itertools.combinations(range(4), 2)
        ),
        windows=(),
        memory=(),
    )


def every_choice(problem: Problem) -> list[Choices]:
    return list(itertools.product(*(range(len(v.cost_us)) for v in problem.variables)))


def some_prices(problem: Problem, seed: int) -> Prices:
    rng = np.random.default_rng(seed)
    return Prices(
        windows=rng.random(len(problem.windows)), memory=0.3 * rng.random(len(problem.memory))
    )


def lagrangian(problem: Problem, choices: Choices, prices: Prices) -> float:
    """What a choice costs at prices: max(a, b) becomes s a + (1 - s) b, budgets become costs."""
    found = evaluate(problem, choices)
    if found.objective_us == math.inf:
        return math.inf
    cost = found.objective_us
    for window, share, a, b in zip(
        problem.windows,
        prices.windows,
        found.window_compute_us,
        found.window_communication_us,
        strict=True,
    ):
        cost += window.multiplicity * (share * a + (1 - share) * b - max(a, b))
    for row, price, used in zip(problem.memory, prices.memory, found.memory_bytes, strict=True):
        cost += price * (used - row.budget_bytes)
    return float(cost)


def exact_dual(problem: Problem, prices: Prices) -> float:
    return min(lagrangian(problem, choices, prices) for choices in every_choice(problem))


def with_tight_rows(
    pairs: list[tuple[Problem, ReducedProblem]],
) -> list[tuple[Problem, ReducedProblem]]:
    """Those whose budgets the reduction left as they are, so that prices mean the same."""
    return [
        (problem, reduced)
        for problem, reduced in pairs
        if np.allclose(
            reduced.budget_bytes, [row.budget_bytes - row.fixed_bytes for row in problem.memory]
        )
    ]


def test_elimination_is_the_exact_minimum_at_any_prices_and_messages() -> None:
    compared = 0
    for seed, (problem, reduced) in enumerate(with_tight_rows(problems(25))):
        prices = some_prices(problem, seed)
        ascent = DualAscent(reduced, prices)
        ascent.sweep(forward=True)
        elimination = Elimination(reduced, most_entries=10_000)
        found = elimination.minimum(*ascent.potentials())
        best = exact_dual(problem, prices)
        if best == math.inf:
            continue
        assert not elimination.split_nodes
        assert found.bound_us == pytest.approx(best, rel=1e-9, abs=1e-9)
        choices = reduced.choices(found.positions)
        assert lagrangian(problem, choices, prices) == pytest.approx(best, rel=1e-9, abs=1e-9)
        compared += 1
    assert compared > 10


def test_elimination_with_split_factors_stays_a_bound() -> None:
    for seed in range(4):
        problem = complete_problem(seed)
        reduced = reduced_of(problem)
        assert reduced is not None
        prices = some_prices(problem, seed)
        elimination = Elimination(reduced, most_entries=3)
        assert elimination.split_nodes
        found = elimination.minimum(*DualAscent(reduced, prices).potentials())
        assert found.bound_us <= exact_dual(problem, prices) + 1e-9


def test_dual_ascent_never_falls_and_bounds_each_option() -> None:
    for seed, (problem, reduced) in enumerate(with_tight_rows(problems(15))):
        prices = some_prices(problem, seed)
        ascent = DualAscent(reduced, prices)
        bounds = []
        for sweep in range(6):
            ascent.sweep(forward=sweep % 2 == 0)
            bounds.append(ascent.swept_bound)
        assert all(b >= a - 1e-9 * max(abs(a), 1.0) for a, b in itertools.pairwise(bounds))
        costs = {c: lagrangian(problem, c, prices) for c in every_choice(problem)}
        for index, (node, option_bounds) in enumerate(
            zip(reduced.nodes, ascent.option_bounds(), strict=True)
        ):
            for option, bound in zip(node.options, option_bounds, strict=True):
                least = min(cost for c, cost in costs.items() if c[index] == option)
                assert bound <= least + 1e-9 * max(abs(bound), 1.0)


def test_one_sweep_bounds_the_choices_of_a_part_and_leaves_the_messages() -> None:
    compared = 0
    for seed, (problem, reduced) in enumerate(with_tight_rows(problems(15))):
        rng, prices = np.random.default_rng(seed), some_prices(problem, seed)
        ascent = DualAscent(reduced, prices)
        ascent.sweep(forward=True)
        ascent.sweep(forward=False)
        before, _, tables = ascent.potentials()
        costs = {c: lagrangian(problem, c, prices) for c in every_choice(problem)}
        scale = max(map(abs, filter(math.isfinite, costs.values())))
        taken = list(costs)[rng.integers(len(costs))]
        masks = [
            (rng.random(len(node.options)) < 0.6) | (node.options == choice)
            for node, choice in zip(reduced.nodes, taken, strict=True)
        ]
        allowed = [set(n.options[m].tolist()) for n, m in zip(reduced.nodes, masks, strict=True)]
        within = [
            cost
            for choices, cost in costs.items()
            if all(choice in each for choice, each in zip(choices, allowed, strict=True))
        ]
        for penalty_us in (0.0, scale, 10 * scale):
            bound = ascent.bound_within(masks, penalty_us=penalty_us)
            assert bound <= min(within, default=math.inf) + 1e-9 * scale
            compared += math.isfinite(min(within, default=math.inf))
        after, _, tables_after = ascent.potentials()
        assert after == before
        assert all((tables_after[index] == tables[index]).all() for index in tables)
    assert compared > 10


def test_cutting_planes_with_all_choices_find_the_best_prices() -> None:
    compared = 0
    for problem, _ in problems(12):
        model = PriceModel(problem=problem)
        if not model.is_needed:
            continue
        for choices in every_choice(problem):
            found = evaluate(problem, choices)
            if found.objective_us < math.inf:
                model.add(choices, found)
        if not model.cuts:
            continue
        count = len(problem.windows) + len(problem.memory)
        upper = np.ones(count)
        step = model.step(model.cuts, lower=np.zeros(count), upper=upper, scale_us=10.0)
        assert step is not None
        assert step.bound_us == pytest.approx(exact_dual(problem, step.prices), rel=1e-6, abs=1e-6)
        for seed in range(5):
            assert exact_dual(problem, some_prices(problem, seed)) <= step.bound_us + 1e-6
        compared += 1
    assert compared > 5


def test_dominated_options_are_never_needed() -> None:
    dropped = 0
    for problem, reduced in problems(40):
        before = reduced.num_options
        drop_dominated(reduced)
        dropped += before - reduced.num_options
        left = [set(node.options.tolist()) for node in reduced.nodes]
        costs: dict[bool, float] = {False: math.inf, True: math.inf}
        for choices in every_choice(problem):
            found = evaluate(problem, choices)
            if not any(found.excess_bytes(problem)):
                kept = all(c in options for c, options in zip(choices, left, strict=True))
                costs[kept] = min(costs[kept], found.objective_us)
        assert costs[True] <= costs[False]
    assert dropped > 0


@pytest.mark.parametrize("mixed", [True, False])
def test_branching_splits_the_options_of_one_node(mixed: bool) -> None:
    for seed, (problem, reduced) in enumerate(problems(20)):
        if all(len(node.options) < 2 for node in reduced.nodes):
            continue
        weights = (
            [dict.fromkeys(node.options.tolist(), 1 / len(node.options)) for node in reduced.nodes]
            if mixed
            else []
        )
        first, second = branch(reduced, weights, some_prices(problem, seed))
        differ = [i for i, mask in enumerate(first) if not (mask & second[i]).all()]
        assert len(differ) == 1
        (node,) = differ
        assert first[node].any()
        assert second[node].any()
        assert (first[node] ^ second[node]).all()


def test_a_restricted_part_leaves_the_whole_as_it_was() -> None:
    for problem, reduced in problems(10):
        part = SearchPart(reduced, some_prices(problem, 0))
        before = [node.options.tolist() for node in reduced.nodes]
        part.restricted([np.arange(len(node.options)) == 0 for node in reduced.nodes])
        assert [node.options.tolist() for node in reduced.nodes] == before


def test_the_incumbent_is_the_cheapest_choice_that_keeps_the_budgets() -> None:
    for problem, _ in problems(10):
        incumbent = Incumbent(problem, 0.0, PriceModel(problem=problem))
        best = math.inf
        for choices in every_choice(problem):
            found = evaluate(problem, choices)
            kept = not any(found.excess_bytes(problem)) and found.objective_us < math.inf
            assert incumbent.offer(choices) == kept
            if kept:
                best = min(best, found.objective_us)
        assert incumbent.objective_us == pytest.approx(best)
