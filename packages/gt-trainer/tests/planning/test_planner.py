"""What a search makes of what its children tell."""

import math
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from planning.outcomes import outcome
from planning.small_problems import small_model

from gt_passes.simulation import h100_sxm
from gt_trainer.launcher.child import ChildFailedError
from gt_trainer.planning.candidates import PlanRequest
from gt_trainer.planning.learned_order import Guess, LearnedOrder
from gt_trainer.planning.planner import (
    _batches,
    _Found,
    _sharing_capture,
    _take_results,
    search_plan,
)
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.search import Bounded, Frontier
from gt_trainer.planning.simulate_recipes import _moved


class _Child:
    def __init__(self, results):
        self.result = lambda: results


def _found(*outcomes, least_bytes=0):
    guesses = [
        Guess(recipe=each.recipe, step_us=(each.step_us,), held_bytes=each.peak_bytes)
        for each in outcomes
    ]
    order = LearnedOrder(guesses, [h100_sxm()])
    return _Found(least_bytes=[least_bytes] * len(outcomes), order=order)


def _frontier(*outcomes):
    return Frontier([Bounded(item=each.recipe, bounds=(1.0,), guess=0.0) for each in outcomes])


def test_a_result_below_its_bound_is_a_failure_and_the_search_goes_on():
    wrong, right = outcome(8, ms=1000.0), outcome(4, ms=1250.0)
    frontier = Frontier(
        [
            Bounded(item=wrong.recipe, bounds=(2e6,), guess=0.0),
            Bounded(item=right.recipe, bounds=(1e6,), guess=1.0),
        ]
    )
    batch, found = [frontier.take(), frontier.take()], _found(wrong, right)
    _take_results(_Child([(wrong,), (right,)]), batch, frontier, found, lambda line: None)
    assert found.outcomes == [(right,)]
    (failure,) = found.failures
    assert failure.reason == (
        f"its bounds were wrong: {wrong.recipe} costs 1e+06, and its bound is 2e+06"
    )
    assert frontier.best() == (1.25e6, right.recipe)


def test_a_result_that_holds_less_than_its_bound_is_a_failure():
    small = outcome(8, gib=40)
    frontier = Frontier([Bounded(item=small.recipe, bounds=(1.0,), guess=0.0)])
    found = _found(small, least_bytes=50 * 2**30)
    _take_results(_Child([(small,)]), [frontier.take()], frontier, found, lambda line: None)
    assert found.outcomes == []
    (failure,) = found.failures
    assert failure.reason == (
        f"its bounds were wrong: {small.recipe} holds 42,949,672,960 bytes, and its bound is "
        "53,687,091,200"
    )


def test_a_child_that_failed_is_a_failure_of_all_that_it_was_to_simulate():
    def fail():
        raise ChildFailedError("Traceback\nValueError: wrong\nhint", "ValueError: wrong")

    child, wrong, other = _Child(None), outcome(8), outcome(4)
    child.result = fail
    frontier, found, told = _frontier(wrong, other), _found(wrong, other), []
    batch = [frontier.take(), frontier.take()]
    _take_results(child, batch, frontier, found, told.append)
    assert [(each.recipe, each.reason) for each in found.failures] == [
        (wrong.recipe, "ValueError: wrong"),
        (other.recipe, "ValueError: wrong"),
    ]
    assert told == [f"failed: {each.recipe}: ValueError: wrong" for each in (wrong, other)]


def test_nothing_more_is_begun_when_enough_was_found_or_time_is_over():
    first, second = outcome(8), outcome(4)
    frontier = _frontier(first, second)
    found = _found(first, second)
    found.outcomes += [(outcome(8, gib=90),), (outcome(4),)]
    assert found.num_fitting == 1
    assert list(_batches(frontier, None, (), found, lambda: False, 1)) == []
    assert list(_batches(frontier, None, (), found, lambda: True, 2)) == []
    assert frontier.num_left == 2


def test_a_search_that_is_stopped_before_it_knows_all_candidates_bounds_nothing():
    model = small_model(random.Random(0))
    request = PlanRequest(num_gpus=1, global_batch=1, gpus_per_node=1, fixed={})
    answers = iter([False, False])
    search = partial(search_plan, None, model, request, [h100_sxm()], seconds=0.0)
    stopped, whole = search(is_stopped=lambda: next(answers, True)), search()
    assert (stopped.num_candidates, stopped.has_all_candidates, stopped.least_us) == (
        2,
        False,
        None,
    )
    assert whole.num_candidates > 2
    assert whole.has_all_candidates
    assert whole.least_us > 0


def test_beside_a_recipe_its_capture_serves_what_is_thought_to_come_soon():
    soon, fuller, fits_nowhere, other = (
        RunRecipe(pp=2, schedule=schedule, microbatch=1, global_batch=8, memory_policy="selective")
        for schedule in ("ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble", "1F1B")
    )
    recipes = [replace(soon, schedule="Interleaved1F1B"), soon, fuller, fits_nowhere, other]
    guesses = [
        None
        if each is fits_nowhere
        else Guess(recipe=each, step_us=(1e6,), held_bytes=2e11 if each is fuller else 1e9)
        for each in recipes
    ]
    frontier = Frontier(
        [
            Bounded(item=each, bounds=(math.inf if guess is None else 1.0,), guess=0.0)
            for each, guess in zip(recipes, guesses, strict=True)
        ]
    )
    number, recipe = frontier.take()
    order = LearnedOrder(guesses, [h100_sxm()])
    assert _sharing_capture(number, recipe, frontier, order) == [(1, soon)]


def test_moved_constants_are_told_as_faster_and_slower():
    ranges = [SimpleNamespace(group="latency", faster_us=1.0, slower_us=2.0)]
    moves = SimpleNamespace(fraction=0.3, ranges=ranges)
    assert _moved(moves) == {"latency 30% faster": 1.0, "latency 30% slower": 2.0}
