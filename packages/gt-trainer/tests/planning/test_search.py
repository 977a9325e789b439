"""What is cut could not have won: on random problems, the search finds what trying all finds."""

import math

import numpy as np
import pytest
from planning.small_problems import small_problem

from gt_trainer.planning.search import Bounded, Frontier, WrongBoundError, search

_NUM_PROBLEMS = 200


def _least(costs):
    """The least cost, and the first recipe that has it."""
    recipe = min(costs, key=costs.__getitem__)
    return (costs[recipe], recipe) if math.isfinite(costs[recipe]) else None


@pytest.mark.parametrize(
    "num_recipes", [12, pytest.param(120, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_pruned_search_finds_exactly_the_best_of_all(num_recipes):
    num_cut = num_candidates = num_solved = 0
    for seed in range(_NUM_PROBLEMS):
        problem = small_problem(seed, num_recipes=num_recipes)
        costs = {recipe: problem.cost(recipe) for recipe in problem.recipes}
        found = search(problem.candidates(), lambda recipe, costs=costs: (costs[recipe],))
        assert found.best() == _least(costs), seed
        assert found.num_left == 0
        num_cut += found.num_cut
        num_candidates += found.num_candidates
        num_solved += found.best() is not None
    assert num_solved > 150
    assert num_cut > num_candidates / 3, "it cuts, and does not just try all"


def _bounded(item, bound, guess=0.0):
    return Bounded(item=item, bounds=(bound,), guess=guess)


def test_the_order_is_that_of_guesses_and_only_bounds_cut():
    costs = {"a": 5.0, "b": 4.0, "c": 9.0}
    simulated = []

    def simulate(item):
        simulated.append(item)
        return (costs[item],)

    candidates = [_bounded("a", 3.0, 2.0), _bounded("b", 3.5, 1.0), _bounded("c", 4.5, 0.5)]
    found = search(candidates, simulate)
    assert simulated == ["c", "b", "a"]
    assert found.best() == (4.0, "b")


def test_among_equals_the_first_wins_whatever_the_order():
    found = search([_bounded("a", 4.0, 9.0), _bounded("b", 4.0, 1.0)], lambda item: (4.0,))
    assert found.best() == (4.0, "a")


def test_what_wins_for_one_goal_alone_is_kept():
    candidates = [
        Bounded(item="now", bounds=(2.0, 2.0), guess=1.0),
        Bounded(item="with more memory", bounds=(math.inf, 1.0), guess=2.0),
        Bounded(item="never", bounds=(math.inf, math.inf), guess=0.0),
    ]
    costs = {"now": (2.0, 2.0), "with more memory": (math.inf, 1.5)}
    found = search(candidates, costs.__getitem__)
    assert found.best(0) == (2.0, "now")
    assert found.best(1) == (1.5, "with more memory")
    assert (found.num_cut, found.num_left) == (1, 0)


def test_a_search_that_stops_says_what_is_left():
    frontier = Frontier([_bounded("a", 1.0, 0.0), _bounded("b", 2.0, 1.0), _bounded("c", 9.0, 2.0)])
    number, _ = frontier.take()
    frontier.record(number, (5.0,))
    assert (frontier.num_cut, frontier.num_left) == (1, 1)


def test_what_was_learned_puts_the_rest_in_another_order():
    frontier = Frontier([_bounded("a", 1.0, 0.0), _bounded("b", 2.0, 1.0), _bounded("c", 3.0, 2.0)])
    number, _ = frontier.take()
    frontier.record(number, (9.0,))
    frontier.reorder(np.array([0.0, -1.0, -2.0]))
    assert [frontier.take()[1], frontier.take()[1], frontier.take()] == ["c", "b", None]


def test_takes_beside_it_what_is_wanted_and_could_win():
    frontier = Frontier([_bounded(name, bound) for name, bound in (("a1", 1), ("a2", 2), ("b", 1))])
    frontier.take()
    assert [item for _, item in frontier.take_also(lambda _, item: item[0] == "a")] == ["a2"]
    assert frontier.take()[1] == "b"


def test_a_cost_below_its_bound_is_not_recorded():
    with pytest.raises(WrongBoundError, match="a costs 1, and its bound is 2"):
        search([_bounded("a", 2.0)], lambda item: (1.0,))
