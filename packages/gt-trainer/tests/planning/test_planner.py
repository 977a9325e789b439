"""What a search makes of what its children tell."""

import time
from types import SimpleNamespace

from planning.outcomes import outcome

from gt_trainer.planning.planner import _batches, _Found, _take_results
from gt_trainer.planning.search import Bounded, Frontier
from gt_trainer.planning.simulate_recipes import _moved


class _Child:
    def __init__(self, results):
        self.result = lambda: results


def test_a_result_below_its_bound_is_a_failure_and_the_search_goes_on():
    wrong, right = outcome(8, ms=1000.0), outcome(4, ms=1250.0)
    frontier = Frontier(
        [
            Bounded(item=wrong.recipe, bounds=(2e6,), guess=0.0),
            Bounded(item=right.recipe, bounds=(1e6,), guess=1.0),
        ]
    )
    batch, found = [frontier.take(), frontier.take()], _Found(least_bytes=[0, 0])
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
    found = _Found(least_bytes=[50 * 2**30])
    _take_results(_Child([(small,)]), [frontier.take()], frontier, found, lambda line: None)
    assert found.outcomes == []
    (failure,) = found.failures
    assert failure.reason == (
        f"its bounds were wrong: {small.recipe} holds 42,949,672,960 bytes, and its bound is "
        "53,687,091,200"
    )


def test_nothing_more_is_begun_when_enough_was_found():
    bounded = [Bounded(item=outcome(n).recipe, bounds=(1.0,), guess=float(n)) for n in (2, 4, 8)]
    found = _Found(outcomes=[(outcome(8, gib=90),), (outcome(4),)])
    until = time.monotonic() + 100
    assert found.num_fitting == 1
    assert list(_batches(Frontier(bounded), None, (), found, until, 1)) == []


def test_moved_constants_are_told_as_faster_and_slower():
    ranges = [SimpleNamespace(group="latency", faster_us=1.0, slower_us=2.0)]
    moves = SimpleNamespace(fraction=0.3, ranges=ranges)
    assert _moved(moves) == {"latency 30% faster": 1.0, "latency 30% slower": 2.0}
