"""The solver's answers against brute force, against HiGHS alone, and at the edges."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import highspy
import numpy as np
import pytest
from random_problems import brute_force, random_problem
from small_problems import edge, pair_problem, variable
from transformer_problem import transformer_problem

from gt_autoparallel.errors import DearPlacementError, PlacementInputError, SolverError
from gt_autoparallel.solver import ForbiddenPairsError, MemoryBudgetError, Progress, Solution, solve
from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import SearchSettings
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.problem import MemoryRow, Problem, Window
from gt_autoparallel.solver.reduced_problem import reduce_problem
from gt_autoparallel.solver.solve import explain_infeasibility

STAGES = {
    "HiGHS on the whole": SearchSettings(),
    "dual ascent and branching": SearchSettings(small_pairs=0, restricted_pairs=10, rounds=8),
    "branching to small parts": SearchSettings(
        small_pairs=12, restricted_pairs=8, rounds=2, whole_nodes=1, most_work=0
    ),
}


@pytest.fixture(params=list(STAGES))
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small problems are made to reach the stages that large ones go through."""
    module = importlib.import_module("gt_autoparallel.solver.solve")
    monkeypatch.setattr(module, "SearchSettings", lambda: STAGES[request.param])
    return str(request.param)


def assert_same(got: float, expected: float, what: object) -> None:
    assert got == expected or math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-9), what


def solved_or_refused(problem: Problem) -> Solution | ForbiddenPairsError | MemoryBudgetError:
    try:
        return solve(problem, time_limit_seconds=1e4)
    except (ForbiddenPairsError, MemoryBudgetError) as error:
        return error


@pytest.mark.parametrize("block", range(5))
def test_finds_the_optimum_of_brute_force(stage: str, block: int) -> None:
    solved = 0
    for seed in range(block * 60, block * 60 + 60):
        problem = random_problem(seed, max_options=3)
        best, best_without_budgets = brute_force(problem)
        result = solved_or_refused(problem)
        if isinstance(result, ForbiddenPairsError):
            assert best_without_budgets == math.inf, seed
            assert result.minimal, seed
        elif isinstance(result, MemoryBudgetError):
            assert best == math.inf > best_without_budgets, seed
            assert result.shortages, seed
        else:
            found = evaluate(problem, result.choices)
            assert not any(found.excess_bytes(problem)), seed
            assert result.objective_us == found.objective_us, seed
            assert_same(result.objective_us, best, seed)
            assert result.proven, seed
            assert result.lower_bound_us <= best + 1e-9 * abs(best), seed
            solved += 1
    assert solved > 15


def medium_problem(seed: int) -> Problem:
    return random_problem(seed, num_variables=24, max_options=6, tightness=0.45, forbidden=0.0)


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_highs_alone_on_medium_problems(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = medium_problem(seed)
    reduced = reduce_problem(problem)
    assert make_arc_consistent(reduced) is None
    expected = HighsModel(reduced).solve(integer=True, seconds=1e4)
    module = importlib.import_module("gt_autoparallel.solver.solve")
    settings = SearchSettings(small_pairs=60, restricted_pairs=60, rounds=12)
    monkeypatch.setattr(module, "SearchSettings", lambda: settings)
    if not expected.feasible:
        with pytest.raises(MemoryBudgetError):
            solve(problem, time_limit_seconds=1e4)
        return
    solution = solve(problem, time_limit_seconds=1e4)
    best = evaluate(problem, reduced.choices(expected.positions[0])).objective_us
    assert solution.objective_us == pytest.approx(best, rel=1e-8)
    assert solution.proven


@pytest.mark.parametrize(
    ("num_variables", "most_parts", "expected"),
    [
        (40, 1, {"ended after part 1"}),
        (30, 2, {"no choice was found up to part 2 of the problem"}),
    ],
)
def test_ends_after_as_many_parts_as_were_asked_for(
    num_variables: int, most_parts: int, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("gt_autoparallel.solver.solve")
    monkeypatch.setattr(module, "SearchSettings", lambda: STAGES["branching to small parts"])
    said = set()
    for seed in range(15):
        problem = random_problem(seed, num_variables=num_variables, tightness=0.5, forbidden=0.0)
        best = solve(problem).objective_us
        try:
            found = solve(problem, most_parts=most_parts)
        except SolverError as error:
            said.add(str(error))
            continue
        assert found.lower_bound_us <= best * (1 + 1e-9)
        assert best <= found.objective_us * (1 + 1e-9)
        if not found.proven:
            said.add(found.method.partition(", ")[2])
    assert said == expected


@pytest.fixture(scope="module")
def transformer() -> Problem:
    return transformer_problem((4,), batch=4, sequence=1024, features=512, hidden=2048, chain=2)


@pytest.fixture(scope="module")
def transformer_solution(transformer: Problem) -> Solution:
    return solve(transformer, time_limit_seconds=1e4, relative_gap=0.02)


def test_solves_what_looks_like_a_transformer(
    transformer: Problem, transformer_solution: Solution
) -> None:
    assert transformer_solution.proven
    assert 0.0 <= transformer_solution.gap <= 0.02 * (1 + 1e-9)
    found = evaluate(transformer, transformer_solution.choices)
    assert found.objective_us == transformer_solution.objective_us
    assert not any(found.excess_bytes(transformer))


def test_gives_the_same_choice_every_time(
    transformer: Problem, transformer_solution: Solution
) -> None:
    again = solve(transformer, time_limit_seconds=1e4, relative_gap=0.02)
    assert again.choices == transformer_solution.choices
    assert again.lower_bound_us == transformer_solution.lower_bound_us


def test_warm_start_never_changes_what_is_true(
    transformer: Problem, transformer_solution: Solution
) -> None:
    row = transformer.memory[0]
    tighter = dataclasses.replace(
        transformer, memory=(dataclasses.replace(row, budget_bytes=row.budget_bytes * 1.2),)
    )
    warm = solve(
        tighter,
        time_limit_seconds=1e4,
        relative_gap=0.02,
        warm_start=transformer_solution.warm_start,
    )
    assert warm.proven
    assert warm.objective_us <= transformer_solution.objective_us


def test_leaves_out_a_warm_start_that_does_not_fit() -> None:
    problem = random_problem(1, max_options=3)
    other = solve(pair_problem())
    assert solve(problem, warm_start=other.warm_start).proven


def test_returns_the_best_choice_yet_when_time_is_over(transformer: Problem) -> None:
    solution = solve(transformer, time_limit_seconds=1e4, relative_gap=0.5)
    late = solve(transformer, time_limit_seconds=1e-3, warm_start=solution.warm_start)
    assert late.objective_us <= solution.objective_us
    assert not late.proven
    assert "time limit" in late.method


def test_a_program_of_which_highs_knows_nothing_ends_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = random_problem(1, max_options=3)
    expected = solve(problem)
    real = highspy.Highs.getModelStatus
    asked: list[object] = []

    def status(highs: highspy.Highs) -> highspy.HighsModelStatus:
        asked.append(highs)
        is_first = len(asked) == 1
        return highspy.HighsModelStatus.kUnknown if is_first else real(highs)

    monkeypatch.setattr(highspy.Highs, "getModelStatus", status)
    assert solve(problem).objective_us == pytest.approx(expected.objective_us)
    assert len(asked) > 1


def test_reports_progress() -> None:
    lines: list[Progress] = []
    solve(pair_problem(budgets=(12.0,)), progress=lines.append)
    assert lines
    assert all(line.lower_bound_us <= line.incumbent_us for line in lines)
    assert "gap" in str(lines[-1])


# ---------------------------------------------------------------- small cases by hand


def test_window_costs_the_longer_of_both() -> None:
    problem = Problem(
        variables=(
            variable("a", [0.0, 0.0], window=0, window_compute_us=[4.0, 7.0]),
            variable("b", [0.0, 0.0]),
        ),
        edges=(
            edge(
                "e",
                0,
                1,
                [[0.0, np.inf], [0.0, 1.0]],
                window=0,
                window_communication_us=[[9.0, 0.0], [6.0, 3.0]],
            ),
        ),
        windows=(Window(name="w", multiplicity=3),),
        memory=(),
        fixed_us=2.0,
    )
    solution = solve(problem)
    assert solution.objective_us == 23.0
    assert solution.choices == (1, 0)


def test_prefers_less_memory_among_equal_costs() -> None:
    problem = Problem(
        variables=(variable("a", [1.0, 1.0, 1.0], memory_bytes=[[7.0, 3.0, 5.0]]),),
        edges=(),
        windows=(),
        memory=(MemoryRow(name="m", budget_bytes=100.0, fixed_bytes=0.0),),
    )
    assert solve(problem).choices == (1,)


@pytest.mark.parametrize("excess", [0.0, 1e-3])
def test_keeps_a_budget_that_is_the_very_minimum(excess: float) -> None:
    problem = random_problem(11, num_variables=8, forbidden=0.0)
    unit = [v.memory_bytes[0] * 8.123456789 for v in problem.variables]
    least = math.fsum(float(row.min()) for row in unit)
    problem = dataclasses.replace(
        problem,
        variables=tuple(
            dataclasses.replace(v, memory_bytes=(row,))
            for v, row in zip(problem.variables, unit, strict=True)
        ),
        memory=(MemoryRow(name="m", budget_bytes=least * (1 + excess * 1e-3), fixed_bytes=0.0),),
    )
    solution = solve(problem)
    assert solution.proven
    assert solution.memory_bytes[0] <= least * (1 + excess * 1e-3)


def test_says_by_how_much_a_budget_is_too_small() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        solve(pair_problem(budgets=(4.0,)))
    assert str(caught.value) == "'row0' needs at least 5 bytes, 1 over its budget of 4"
    (shortage,) = caught.value.shortages
    assert (shortage.minimum_bytes, shortage.excess_bytes) == (5.0, 1.0)
    assert shortage.choices == (1, 1)
    assert not caught.value.jointly


def test_says_that_budgets_cannot_be_kept_together() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        solve(pair_problem(budgets=(12.0, 12.0)))
    assert caught.value.jointly
    assert str(caught.value) == (
        "each memory budget alone can be kept, but not all together; with the smallest excess in "
        "all 'row0' takes 13 bytes, 1 over its budget of 12; 'row1' takes 13 bytes, 1 over its "
        "budget of 12"
    )


def test_a_choice_that_keeps_all_budgets_is_no_shortage() -> None:
    with pytest.raises(SolverError) as caught:
        explain_infeasibility(pair_problem(budgets=(13.0, 13.0)), solve)
    assert str(caught.value) == (
        "the search found no choice that keeps all memory budgets, and one does"
    )


def test_names_a_smallest_set_of_edges_in_conflict() -> None:
    inf = np.inf
    same, other = [[0.0, inf], [inf, 0.0]], [[inf, 0.0], [0.0, inf]]
    with pytest.raises(ForbiddenPairsError) as caught:
        solve(pair_problem(tables=([[0.0, 1.0], [2.0, 3.0]], same, other)))
    assert caught.value.edges == (1, 2)
    assert caught.value.minimal
    assert str(caught.value) == (
        "no combination of options of 'a', 'b' avoids what 'e1', 'e2' forbid"
    )


def test_finds_a_conflict_that_only_a_search_can_see() -> None:
    inf = np.inf
    differ = [[inf, 0.0], [0.0, inf]]
    problem = Problem(
        variables=tuple(variable(name, [0.0, 0.0]) for name in "abcd"),
        edges=(
            edge("ab", 0, 1, differ),
            edge("bc", 1, 2, differ),
            edge("ca", 2, 0, differ),
            edge("cd", 2, 3, differ),
        ),
        windows=(),
        memory=(),
    )
    with pytest.raises(ForbiddenPairsError, match="'ab', 'bc', 'ca' forbid") as caught:
        solve(problem)
    assert caught.value.variables == (0, 1, 2)


def test_names_a_variable_without_options() -> None:
    problem = Problem(variables=(variable("a", [np.inf, np.inf]),), edges=(), windows=(), memory=())
    with pytest.raises(ForbiddenPairsError, match="every option of 'a' is forbidden"):
        solve(problem)


def test_lists_everything_that_is_wrong_with_a_problem() -> None:
    problem = dataclasses.replace(
        pair_problem(tables=([[0.0, np.nan], [0.0, 0.0]],)),
        variables=(variable("a", [1.0, -np.inf]), variable("b", [])),
    )
    with pytest.raises(PlacementInputError) as caught:
        solve(problem)
    assert str(caught.value) == (
        "placement problem: variable 'a': cost_us has -inf; variable 'b': has no option; "
        "edge 'e0': right_labels has shape (2,); the options of 'b' ask for (0,); "
        "edge 'e0': cost_us has nan"
    )


def test_accepts_a_budget_without_limit() -> None:
    solution = solve(pair_problem(budgets=(math.inf,)))
    assert solution.choices == (0, 0)
    assert solution.memory_prices == (0.0,)


def test_solves_a_problem_without_variables() -> None:
    empty = Problem(variables=(), edges=(), windows=(), memory=(), fixed_us=3.0)
    assert solve(empty).objective_us == 3.0


def test_time_may_be_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("gt_autoparallel.solver.solve")
    search, deadlines = module.Search, []

    def of_search(**arguments: Any) -> object:
        deadlines.append(arguments["deadline"])
        return search(**arguments)

    monkeypatch.setattr(module, "Search", of_search)
    problem = random_problem(0, num_variables=3, max_options=2)
    assert solve(problem, time_limit_seconds=math.inf).proven
    assert [each.at for each in deadlines] == [math.inf]


@pytest.mark.parametrize("seed", range(12))
def test_what_costs_as_much_as_is_said_or_more_is_not_looked_for(stage: str, seed: int) -> None:
    problem = random_problem(seed, num_variables=8, max_options=4, forbidden=0.0)
    best = solved_or_refused(problem)
    if not isinstance(best, Solution):
        with pytest.raises((DearPlacementError, type(best))):
            solve(problem, below_us=1e9)
        return
    above = best.objective_us * (1 + 1e-6) + 1e-6
    assert_same(solve(problem, below_us=above).objective_us, best.objective_us, seed)
    for below_us in (best.objective_us, 0.5 * best.objective_us):
        with pytest.raises(DearPlacementError) as error:
            solve(problem, below_us=below_us)
        assert_same(error.value.least_us, below_us, seed)
        assert error.value.least_us <= best.objective_us
    # What costs less by less than the gap is not said to cost more.
    found = solve(problem, relative_gap=0.01, below_us=best.objective_us * (1 + 1e-3) + 1e-3)
    assert found.lower_bound_us <= best.objective_us * (1 + 1e-9)
    assert found.gap <= 0.01 * (1 + 1e-9)


@pytest.mark.parametrize("seed", [2, 3])
def test_a_gap_ends_the_search_of_what_costs_hardly_more_than_is_said(
    stage: str, seed: int
) -> None:
    problem = random_problem(seed, num_variables=14, max_options=4, forbidden=0.0)
    below_us = 0.999 * solve(problem).objective_us
    found = solve(problem, relative_gap=0.05, below_us=below_us)
    assert found.lower_bound_us < below_us <= found.objective_us
    assert found.gap <= 0.05 * (1 + 1e-9)
    with pytest.raises(DearPlacementError):  # what may not end so proves it
        solve(problem, below_us=below_us)
