"""What a search makes of what its children tell."""

import math
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from planning.outcomes import outcome
from planning.small_problems import small_model

from gt_config import ConfigError, Violation
from gt_passes.simulation import h100_sxm
from gt_trainer.launcher.child import ChildFailedError
from gt_trainer.planning import planner
from gt_trainer.planning.candidates import PlanRequest
from gt_trainer.planning.planner import (
    _batches,
    _Found,
    _shares_capture,
    _take_results,
    search_plan,
)
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.search import BoundedCandidate, Frontier
from gt_trainer.planning.simulate_recipes import _moved

_ROOM = (74 * 2**30,)


class _Child:
    def __init__(self, results):
        self.result = lambda: results


def _frontier(*outcomes, bounds=None, least_bytes=0):
    return Frontier(
        [
            BoundedCandidate(
                item=each.recipe,
                bounds_us=(bound,),
                least_bytes=least_bytes,
                guesses_us=(bound,),
                guess_bytes=each.peak_bytes,
            )
            for each, bound in zip(outcomes, bounds or [1.0] * len(outcomes), strict=True)
        ],
        _ROOM,
    )


def _batch(frontier, number):
    taken = [frontier.take() for _ in range(number)]
    return {index: (recipe, None) for index, recipe in taken}


def test_a_result_below_its_bound_is_a_failure_and_the_search_goes_on():
    wrong, right = outcome(8, ms=1000.0), outcome(4, ms=1250.0)
    frontier, found = _frontier(right, wrong, bounds=(1e6, 2e6)), _Found()
    batch = _batch(frontier, 2)
    _take_results(_Child([(right,), (wrong,)]), batch, frontier, found, lambda line: None)
    assert found.outcomes == [(right,)]
    (failure,) = found.failures
    assert failure.reason == (
        f"its bounds were wrong: {wrong.recipe} costs 1e+06, and its bound is 2e+06"
    )
    assert frontier.best() == (1.25e6, right.recipe)


def test_a_result_that_holds_less_than_its_bound_is_a_failure():
    small = outcome(8, gib=40)
    frontier, found = _frontier(small, least_bytes=50 * 2**30), _Found()
    _take_results(_Child([(small,)]), _batch(frontier, 1), frontier, found, lambda line: None)
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
    frontier, found, told = _frontier(wrong, other), _Found(), []
    batch = _batch(frontier, 2)
    _take_results(child, batch, frontier, found, told.append)
    assert [(each.recipe, each.reason) for each in found.failures] == [
        (wrong.recipe, "ValueError: wrong"),
        (other.recipe, "ValueError: wrong"),
    ]
    assert told == [f"failed: {each.recipe}: ValueError: wrong" for each in (wrong, other)]


def test_nothing_more_is_begun_when_enough_was_found_or_time_is_over():
    first, second = outcome(8), outcome(4)
    frontier = _frontier(first, second)
    found = _Found()
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


def test_a_capture_serves_other_schedules_of_its_stages():
    recipe = RunRecipe(
        pp=2, schedule="Interleaved1F1B", microbatch=1, global_batch=8, memory_policy="selective"
    )
    shares = _shares_capture(recipe)
    assert shares(replace(recipe, schedule="ZBVZeroBubble"))
    assert not shares(replace(recipe, schedule="1F1B"))
    assert not shares(replace(recipe, microbatch=2, schedule="ZBVZeroBubble"))
    assert not _shares_capture(replace(recipe, pp=1, schedule=None))(recipe)


@pytest.mark.parametrize("refused", [(), (0,), (1,), (0, 1)], ids=str)
def test_what_a_run_cannot_have_is_counted_and_not_simulated(monkeypatch, refused):
    recipes = [
        RunRecipe(pp=2, schedule=schedule, microbatch=1, global_batch=8, memory_policy="selective")
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    ]

    def config_of(base, recipe, *, asked):
        if recipes.index(recipe) in refused:
            raise ConfigError([Violation(flag="--x", value=1, allowed="2", fix="")])
        return f"configuration of {recipe}"

    monkeypatch.setattr(planner, "recipe_config", config_of)
    frontier, found = _frontier(*(replace(outcome(), recipe=each) for each in recipes)), _Found()
    batches = list(_batches(frontier, None, (), found, lambda: False, math.inf))
    simulated = [recipe for batch in batches for recipe, _ in batch.values()]
    assert simulated == [each for place, each in enumerate(recipes) if place not in refused]
    assert len(batches) == (len(refused) < 2)
    assert found.refusals == ({"--x 1: allowed is 2": len(refused)} if refused else {})


def test_moved_constants_are_told_as_faster_and_slower():
    ranges = [SimpleNamespace(group="latency", faster_us=1.0, slower_us=2.0)]
    moves = SimpleNamespace(fraction=0.3, ranges=ranges)
    assert _moved(moves) == {"latency 30% faster": 1.0, "latency 30% slower": 2.0}
