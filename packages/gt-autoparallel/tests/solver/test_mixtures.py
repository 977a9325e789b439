"""Mixtures and their bounds against every mixture there is, and where they help."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from random_problems import brute_force_mixtures, cost_of_mixture, random_block_problem
from small_problems import edge, variable

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.solver import WarmStart, evaluate_mixture, solve, solve_mixed
from gt_autoparallel.solver.bounding import SearchSettings
from gt_autoparallel.solver.mixed_search import MixedSolution
from gt_autoparallel.solver.mixtures import best_mixture, doubling_groups
from gt_autoparallel.solver.problem import Block, MemoryRow, Problem, Window
from gt_autoparallel.solver.search import Search

NUM_PROBLEMS = 60

STAGES = {
    "LP of all options": SearchSettings(),
    "LP of promising options": SearchSettings(small_pairs=0, relaxed_pairs=12, rounds=4),
    "without prices at first": SearchSettings(small_pairs=0, relaxed_pairs=8, rounds=0),
}


@pytest.fixture(params=list(STAGES))
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    module = importlib.import_module("gt_autoparallel.solver.mixed_search")
    monkeypatch.setattr(module, "SearchSettings", lambda: STAGES[request.param])
    return str(request.param)


@cache
def drawn(seed: int) -> tuple[Problem, float]:
    """A random problem, and what its cheapest mixture costs."""
    problem = random_block_problem(seed, inner=2, outer=1 + seed % 2, max_options=4 - seed % 2)
    return problem, brute_force_mixtures(problem)


def shelves(budget: float, *, size: int = 6) -> Problem:
    """Things that each keep 8 bytes, or none for 5 us; at work one without has 2 bytes for it."""
    return Problem(
        variables=(
            variable(
                "kept?", [0.0, 5.0 * size], memory_bytes=[[8.0 * size, 2.0], [8.0 * size, 0.0]]
            ),
        ),
        edges=(),
        windows=(),
        memory=(
            MemoryRow(name="at work", budget_bytes=budget, fixed_bytes=0.0),
            MemoryRow(name="elsewhere", budget_bytes=budget, fixed_bytes=0.0),
        ),
        blocks=(
            Block(
                name="shelves",
                size=size,
                variables=(0,),
                windows=(),
                passing_bytes={0: (np.array([0.0, 2.0]),)},
            ),
        ),
    )


def things(size: int, count: int) -> Block:
    """A block of all variables, none of which has bytes on the way."""
    return Block(
        name="things",
        size=size,
        variables=tuple(range(count)),
        windows=(),
        passing_bytes={},
    )


def opposed_rows(budget: float, *, size: int = 5, count: int = 4) -> Problem:
    """Options that are free and large, small in one of two rows, or dear and small in both.

    ``budget`` is that of a thing's part of a variable.
    """
    costs = size * np.array([0.0, 10.0, 10.0, 30.0])
    rows = size * np.array([[10.0, 0.0, 20.0, 5.0], [10.0, 20.0, 0.0, 5.0]])
    unequal = (1.0 - np.eye(4)).tolist()
    return Problem(
        variables=tuple(
            variable(f"v{number}", costs.tolist(), memory_bytes=rows.tolist())
            for number in range(count)
        ),
        edges=tuple(edge(f"e{number}", number, number + 1, unequal) for number in range(count - 1)),
        windows=(),
        memory=tuple(
            MemoryRow(name=name, budget_bytes=budget * size * count, fixed_bytes=0.0)
            for name in ("one", "other")
        ),
        blocks=(things(size, count),),
    )


@pytest.mark.parametrize("size", range(1, 40))
def test_groups_make_any_number(size: int) -> None:
    groups = doubling_groups(size)
    sums = {0}
    for group in groups:
        sums |= {each + group for each in sums}
    assert sums == set(range(size + 1))
    assert len(groups) <= 1 + size.bit_length()


def test_a_mixture_costs_what_its_things_cost_one_by_one() -> None:
    rng = np.random.default_rng(0)
    for seed in range(60):
        problem = random_block_problem(seed, size=4, max_options=3)
        counts = [len(each.cost_us) for each in problem.variables]
        things = [[int(rng.integers(n)) for n in counts[:3]] for _ in range(4)]
        outer = [int(rng.integers(n)) for n in counts[3:]]
        cost, taken = cost_of_mixture(problem, things, outer)
        choices = [tuple(thing[v] for thing in things) for v in range(3)]
        found = evaluate_mixture(problem, [*choices, *((choice,) for choice in outer)])
        assert found.choices == (*choices, *((choice,) for choice in outer))
        assert found.objective_us == cost or math.isclose(found.objective_us, cost, rel_tol=1e-9)
        assert np.allclose(found.memory_bytes, taken, rtol=1e-9), seed


def test_finds_the_cheapest_of_all_mixtures() -> None:
    solved = 0
    for seed in range(NUM_PROBLEMS):
        problem, best = drawn(seed)
        found = best_mixture(
            problem,
            [np.arange(len(each.cost_us)) for each in problem.variables],
            relative_gap=0.0,
            seconds=60.0,
            max_nodes=10_000,
        )
        if found is None:
            assert best == math.inf, seed
            continue
        assert math.isclose(found.objective_us, best, rel_tol=1e-8, abs_tol=1e-8), seed
        solved += 1
    assert solved > 20


def test_bounds_are_below_every_mixture(stage: str) -> None:
    closed = mixed = 0
    for seed in range(NUM_PROBLEMS):
        problem, best = drawn(seed)
        found = solve_mixed(problem, relative_gap=1e-3, time_limit_seconds=1e4)
        assert found.lower_bound_us <= best + 1e-9 * abs(best), seed
        if found.mixture is None:
            continue
        mixture = evaluate_mixture(problem, found.mixture.choices)
        assert mixture.objective_us >= best - 1e-9 * abs(best), seed
        assert math.isclose(mixture.objective_us, found.mixture.objective_us, rel_tol=1e-12)
        for used, row in zip(mixture.memory_bytes, problem.memory, strict=True):
            assert used <= row.budget_bytes, seed
        if found.gap <= 1e-3:
            assert mixture.objective_us <= best * (1 + 1.1e-3) + 1e-9, seed
            closed += 1
        mixed += any(len(set(things)) > 1 for things in found.mixture.choices)
    assert closed > 10
    assert mixed > 3


def test_some_things_do_what_others_do_not() -> None:
    # 26 bytes: three keep (24), and one of the others is at work.
    problem = shelves(26.0)
    found = solve_mixed(problem, relative_gap=0.1, time_limit_seconds=60.0)
    assert found.mixture is not None
    assert sorted(found.mixture.choices[0]) == [0, 0, 0, 1, 1, 1]
    assert found.mixture.objective_us == 15.0
    assert found.mixture.memory_bytes == (26.0, 24.0)
    assert found.lower_bound_us <= 15.0
    # Doing all the same, none may keep.
    assert solve(problem).objective_us == 30.0


def test_the_best_of_choices_that_are_alike_is_a_mixture() -> None:
    problem = shelves(48.0)
    start = WarmStart(choices=solve(problem).choices)
    found = solve_mixed(problem, relative_gap=0.0, time_limit_seconds=60.0, warm_start=start)
    assert found.mixture is not None
    assert (found.mixture.objective_us, found.lower_bound_us, found.gap) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rounds", [0, 4])
def test_finds_what_keeps_all_budgets_where_the_least_of_each_exceeds_others(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("gt_autoparallel.solver.mixed_search")
    # As few turns as close the gap, once there are options that keep the budgets.
    settings = SearchSettings(small_pairs=0, relaxed_pairs=0, rounds=rounds, relaxations=3)
    monkeypatch.setattr(module, "SearchSettings", lambda: settings)
    problem = opposed_rows(6.0)
    found = solve_mixed(problem, relative_gap=0.01, time_limit_seconds=60.0)
    # Of five things one may take what is free and large, if four take what is small in both rows.
    assert found.mixture is not None
    assert found.mixture.objective_us == 4 * 30.0 * len(problem.variables)
    assert found.gap <= 0.01 * (1 + 1e-9)


def drawn_rows(seed: int, *, size: int = 5, count: int = 6) -> Problem:
    """Six options of six variables whose bytes in two to four rows are drawn, within budgets that
    one drawn choice keeps, and few others."""
    draw = np.random.default_rng(seed)
    num_rows = int(draw.integers(2, 5))
    costs = draw.integers(0, 50, (count, 6)).astype(float)
    rows = draw.integers(0, 30, (count, num_rows, 6)).astype(float)
    kept = draw.integers(0, 6, count)
    least = rows[np.arange(count), :, kept].sum(axis=0)
    budgets = size * least * (1 + 0.1 * draw.random(num_rows))
    moves = draw.integers(0, 20, (count - 1, 6, 6)).astype(float)
    moves[draw.random(moves.shape) < 0.3] = math.inf
    moves[np.arange(count - 1), kept[:-1], kept[1:]] = 1.0
    return Problem(
        variables=tuple(
            variable(f"v{n}", (size * costs[n]).tolist(), memory_bytes=(size * rows[n]).tolist())
            for n in range(count)
        ),
        edges=tuple(edge(f"e{n}", n, n + 1, (size * moves[n]).tolist()) for n in range(count - 1)),
        windows=(),
        memory=tuple(
            MemoryRow(name=f"row {n}", budget_bytes=float(budget), fixed_bytes=0.0)
            for n, budget in enumerate(budgets)
        ),
        blocks=(things(size, count),),
    )


@pytest.mark.parametrize("seed", range(20))
def test_prices_that_were_raised_to_find_options_are_not_those_of_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = drawn_rows(seed)
    usual = solve_mixed(problem, relative_gap=0.001, time_limit_seconds=60.0)
    module = importlib.import_module("gt_autoparallel.solver.mixed_search")
    settings = SearchSettings(small_pairs=0, relaxed_pairs=0, rounds=2)
    monkeypatch.setattr(module, "SearchSettings", lambda: settings)
    found = solve_mixed(problem, relative_gap=0.001, time_limit_seconds=60.0)
    assert sum(found.memory_prices) <= 20 * sum(usual.memory_prices)
    assert found.warm_start.memory_prices == found.memory_prices


def test_nothing_that_keeps_a_budget_is_told_by_the_bound() -> None:
    found = solve_mixed(shelves(1.0), relative_gap=0.1, time_limit_seconds=60.0)
    assert (found.mixture, found.lower_bound_us) == (None, math.inf)


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("settings", [*STAGES.values()][:2], ids=[*STAGES][:2])
def test_a_search_ends_where_every_mixture_is_too_dear_and_says_what_is_known(
    settings: SearchSettings, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("gt_autoparallel.solver.mixed_search")
    monkeypatch.setattr(module, "SearchSettings", lambda: settings)
    turns: list[object] = []
    relaxed = module._MixedSearch._relaxed
    monkeypatch.setattr(
        module._MixedSearch, "_relaxed", lambda search: turns.append(search) or relaxed(search)
    )
    problem, best_us = drawn(seed)
    assert best_us < math.inf

    def solved(below_us: float) -> MixedSolution:
        turns.clear()
        return solve_mixed(problem, relative_gap=0.01, time_limit_seconds=60.0, below_us=below_us)

    usual = solved(math.inf)
    assert turns
    assert solved(2 * best_us).mixture == usual.mixture
    assert turns
    found = solved(0.5 * best_us)
    assert not turns, "the first bound is above"
    assert 0.5 * best_us <= found.lower_bound_us < usual.lower_bound_us


def test_a_bound_at_prices_that_were_raised_says_no_more_than_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = drawn_rows(7)
    tight = [replace(row, budget_bytes=0.8 * row.budget_bytes) for row in problem.memory]
    problem = replace(problem, memory=tuple(tight))
    module = importlib.import_module("gt_autoparallel.solver.mixed_search")
    settings = SearchSettings(small_pairs=0, relaxed_pairs=0, rounds=2, relaxations=2)
    monkeypatch.setattr(module, "SearchSettings", lambda: settings)

    def bound_us(below_us: float) -> float:
        found = solve_mixed(problem, relative_gap=0.001, time_limit_seconds=60.0, below_us=below_us)
        assert found.mixture is None
        return found.lower_bound_us

    assert math.inf > bound_us(math.inf) > 10 * 1000.0
    assert bound_us(1000.0) == 1000.0


def test_the_same_problem_gives_the_same_mixture(stage: str) -> None:
    problem = random_block_problem(7, size=5, inner=6, outer=3, max_options=4)
    first, second = (
        solve_mixed(problem, relative_gap=1e-3, time_limit_seconds=1e4) for _ in range(2)
    )
    assert first.mixture == second.mixture
    assert first.lower_bound_us == second.lower_bound_us


def test_a_mixture_does_not_lose_to_a_rival() -> None:
    problem = shelves(26.0)
    rival = [np.array([False, True])]
    found = solve_mixed(problem, relative_gap=10.0, time_limit_seconds=60.0, rivals=[rival])
    assert found.mixture is not None
    assert found.mixture.objective_us <= 30.0


def test_a_rival_of_a_mixture_is_searched_without_branching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Branching would look on for the best choice of which all things do the same."""
    problem = random_block_problem(4, size=5, inner=8, outer=4, max_options=5)
    settings = SearchSettings(
        small_pairs=0, restricted_pairs=20, relaxed_pairs=20, relaxations=2, rounds=2
    )
    mixing, contesting = (
        importlib.import_module(f"gt_autoparallel.solver.{name}")
        for name in ("mixed_search", "rivals")
    )
    monkeypatch.setattr(mixing, "SearchSettings", lambda: settings)
    contests: list[Search] = []

    def contest(**fields: Any) -> Search:
        contests.append(Search(**fields))
        return contests[-1]

    monkeypatch.setattr(contesting, "Search", contest)

    def num_parts() -> int:
        everything = [np.ones(len(each.cost_us), dtype=bool) for each in problem.variables]
        solve_mixed(problem, relative_gap=0.5, time_limit_seconds=60.0, rivals=[everything])
        return contests[-1].num_parts

    assert num_parts() == 1
    real = contesting.beat_rivals
    monkeypatch.setattr(
        mixing, "beat_rivals", lambda *args, most_parts, **rest: real(*args, **rest)
    )
    assert num_parts() > 1


def test_lists_everything_that_is_wrong_with_blocks() -> None:
    problem = shelves(26.0)
    (block,) = problem.blocks
    wrong = replace(
        problem,
        variables=(replace(problem.variables[0], window=0), problem.variables[0]),
        windows=(Window(name="w", multiplicity=2),),
        edges=(
            edge("between", 0, 1, [[0.0, 0.0], [0.0, 0.0]], window=0),
            edge("within", 0, 0, [[0.0, 0.0], [0.0, 0.0]], window=0),
        ),
        blocks=(
            replace(block, passing_bytes={0: ()}),
            replace(block, name="others", variables=(1, 0), windows=(0,), passing_bytes={}),
        ),
    )
    with pytest.raises(PlacementInputError) as error:
        solve_mixed(wrong, relative_gap=0.1, time_limit_seconds=1.0)
    assert str(error.value) == (
        "placement problem: block 'shelves': has passing bytes of 0 variables, and 1 variables; "
        "block 'shelves': variable 'kept?' computes in a window of others; "
        "block 'others': window 'w' has multiplicity 2; it must be one for each of 6 things; "
        "variable 'kept?' is in two blocks; edge 'between' ends in two blocks; "
        "edge 'within' ends in a block that does not have its window"
    )


def test_lists_everything_that_is_wrong_with_passing_bytes() -> None:
    problem = shelves(26.0)
    (block,) = problem.blocks
    passing = {
        0: (np.array([0.0]),),
        1: (np.array([0.0, np.inf]),),
        2: (np.array([0.0, 2.0]),),
        -1: (np.array([0.0, 2.0]),),
    }
    others = replace(
        block, name="others", variables=(1,), passing_bytes={1: block.passing_bytes[0]}
    )
    wrong = replace(
        problem,
        variables=(problem.variables[0], replace(problem.variables[0], name="lent?")),
        blocks=(replace(block, passing_bytes=passing), others),
    )
    with pytest.raises(PlacementInputError) as error:
        solve_mixed(wrong, relative_gap=0.1, time_limit_seconds=1.0)
    assert str(error.value) == (
        "placement problem: block 'shelves': passing bytes of 'kept?' have shape (1,); its options "
        "ask for (2,); block 'shelves': passing bytes of 'kept?' are not all finite; "
        "block 'shelves': has passing bytes in memory row 2, which does not exist; "
        "block 'shelves': has passing bytes in memory row -1, which does not exist; "
        "memory row 'elsewhere' has passing bytes of two blocks"
    )
