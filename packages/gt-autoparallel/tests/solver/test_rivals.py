"""Whatever gap a search may leave, its result costs no more than any rival's, if time allows."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from random_problems import random_problem
from small_problems import edge, variable

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.solver import Rival, Solution, solve
from gt_autoparallel.solver.bounding import SearchSettings
from gt_autoparallel.solver.incumbent import Incumbent
from gt_autoparallel.solver.message_passing import Prices
from gt_autoparallel.solver.price_model import PriceModel
from gt_autoparallel.solver.problem import Problem
from gt_autoparallel.solver.reduced_problem import reduce_problem


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that end at the first choice within the gap, as those of large problems do."""
    module = importlib.import_module("gt_autoparallel.solver.solve")
    settings = SearchSettings(small_pairs=60, restricted_pairs=60, rounds=12)
    monkeypatch.setattr(module, "SearchSettings", lambda: settings)


def options(problem: Problem, *, some: float, seed: int, always: tuple[int, ...]) -> Rival:
    """The options of ``always``, and a share of the others."""
    rng = np.random.default_rng(seed)
    return [
        (rng.random(len(v.cost_us)) < some) | (np.arange(len(v.cost_us)) == choice)
        for v, choice in zip(problem.variables, always, strict=True)
    ]


@pytest.mark.parametrize("seed", [6, 8, 9, 10])
@pytest.mark.usefixtures("early")
def test_a_search_that_ends_early_does_not_lose_to_a_rival(seed: int) -> None:
    problem = random_problem(seed, num_variables=24, max_options=6, tightness=0.45, forbidden=0.0)
    best = solve(problem)
    around_best = options(problem, some=0.3, seed=seed, always=best.choices)
    elsewhere = options(problem, some=0.6, seed=seed, always=(0,) * len(problem.variables))

    alone = solve(problem, relative_gap=0.9)
    assert alone.objective_us > best.objective_us * 1.001, "this seed would show nothing"

    together = solve(problem, relative_gap=0.9, rivals=[elsewhere, around_best])
    assert together.objective_us == pytest.approx(best.objective_us, rel=1e-9)
    assert together.lower_bound_us == alone.lower_bound_us, "of all choices, not of the rival's"
    assert together.gap < alone.gap


def solved(problem: Problem, *rivals: Rival) -> Solution:
    return solve(problem, relative_gap=0.9, rivals=rivals)


@pytest.mark.usefixtures("early")
def test_rivals_that_are_left_when_it_is_late_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = random_problem(6, num_variables=24, max_options=6, tightness=0.45, forbidden=0.0)
    all_options = [np.ones(len(v.cost_us), dtype=bool) for v in problem.variables]
    alone = solved(problem)
    looked_at: list[object] = []
    solving, contesting = (
        importlib.import_module(f"gt_autoparallel.solver.{name}") for name in ("solve", "rivals")
    )
    real, part = contesting.beat_rivals, contesting.SearchPart

    def of_part(*args: object) -> object:
        looked_at.append(args)
        return part(*args)

    monkeypatch.setattr(contesting, "SearchPart", of_part)
    assert solved(problem, all_options).objective_us < alone.objective_us
    assert len(looked_at) == 1, "no bound of the whole excludes this rival: its part is made"

    def late(*args: object, deadline: float, **rest: object) -> None:
        real(*args, deadline=-math.inf, **rest)

    monkeypatch.setattr(solving, "beat_rivals", late)
    assert solved(problem, all_options).objective_us == alone.objective_us
    assert len(looked_at) == 1


@pytest.mark.parametrize(("known", "num_searched"), [(0, 0), (1, 1)])
def test_a_rival_that_option_bounds_exclude_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, known: int, num_searched: int
) -> None:
    problem = Problem(
        variables=(variable("a", [0.0, 100.0]), variable("b", [0.0, 0.0])),
        edges=(),
        windows=(),
        memory=(),
    )
    contesting = importlib.import_module("gt_autoparallel.solver.rivals")
    searched: list[object] = []
    real = contesting.Search
    monkeypatch.setattr(
        contesting, "Search", lambda **fields: searched.append(fields) or real(**fields)
    )
    incumbent = Incumbent(problem, 0.0, PriceModel(problem=problem))
    incumbent.offer((known, 0))
    contesting.beat_rivals(
        incumbent,
        reduce_problem(problem),
        [[np.array([True, False]), np.array([True, True])]],
        prices=Prices(windows=np.zeros(0), memory=np.zeros(0)),
        settings=SearchSettings(),
        deadline=math.inf,
    )
    assert incumbent.objective_us == 0.0
    assert len(searched) == num_searched


def test_a_rival_that_one_sweep_of_the_whole_excludes_has_no_part_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of its options alone could be in a choice that costs 60, and all of them cost 120."""
    problem = Problem(
        variables=tuple(variable(name, [0.0, 60.0]) for name in "ab"),
        edges=(),
        windows=(),
        memory=(),
        fixed_us=10.0,
    )
    contesting = importlib.import_module("gt_autoparallel.solver.rivals")
    monkeypatch.setattr(contesting, "SearchPart", lambda *_: pytest.fail("a part is made"))
    incumbent = Incumbent(problem, 0.0, PriceModel(problem=problem), below_us=100.0)
    contesting.beat_rivals(
        incumbent,
        reduce_problem(problem),
        [[np.array([False, True])] * 2],
        prices=Prices(windows=np.zeros(0), memory=np.zeros(0)),
        settings=SearchSettings(),
        deadline=math.inf,
    )
    assert incumbent.choices == ()


def test_rivals_without_any_choice_are_passed_over() -> None:
    problem = Problem(
        variables=tuple(variable(name, [1.0, 2.0]) for name in "ab"),
        edges=(edge("same", 0, 1, [[0.0, np.inf], [np.inf, 0.0]]),),
        windows=(),
        memory=(),
    )
    none = [np.array([False, False]), np.array([True, True])]
    contradictory = [np.array([True, False]), np.array([False, True])]
    assert solved(problem, none, contradictory).choices == (0, 0)


def test_a_rival_may_take_what_another_option_dominates() -> None:
    """Option 1 of ``b`` is worse than option 0 in everything, but the rival has no other."""
    problem = Problem(
        variables=(variable("a", [5.0, 1.0]), variable("b", [1.0, 2.0])),
        edges=(),
        windows=(),
        memory=(),
    )
    assert solved(problem, [np.array([False, True]), np.array([False, True])]).objective_us == 2.0


def test_masks_that_are_not_those_of_the_options_are_refused() -> None:
    problem = Problem(variables=(variable("a", [5.0, 1.0]),), edges=(), windows=(), memory=())
    with pytest.raises(PlacementInputError) as error:
        solve(problem, rivals=[[np.array([True])], [np.array([True, True])], []])
    assert str(error.value) == (
        "placement problem: rival 0: its masks are not one of all options for each variable; "
        "rival 2: its masks are not one of all options for each variable"
    )
