"""What was simulated changes which recipe is next."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from planning.outcomes import outcome

from gt_passes.simulation import h100_sxm
from gt_trainer.planning.learned_order import Guess, LearnedOrder

_GIB = 2**30
_ALIKE = outcome(8, ms=1000.0, gib=60)
_OTHER_POLICY = replace(_ALIKE.recipe, memory_policy="full_recompute")
_PIPELINE = replace(_ALIKE.recipe, pp=2, schedule="1F1B")


def _order() -> LearnedOrder:
    recipes = (_ALIKE.recipe, replace(_ALIKE.recipe, dp_shard=16), _OTHER_POLICY, _PIPELINE)
    guesses = [
        Guess(recipe=each, step_us=(1e6 + number,), held_bytes=60 * _GIB)
        for number, each in enumerate(recipes)
    ]
    return LearnedOrder(guesses, [h100_sxm()])


def _next(order: LearnedOrder) -> list[int]:
    return sorted(range(1, 4), key=order.places().__getitem__)


def test_before_anything_was_simulated_guesses_alone_decide() -> None:
    assert _next(_order()) == [1, 2, 3]


def test_what_does_not_fit_puts_off_recipes_alike_and_less_so_others_without_a_pipeline() -> None:
    order = _order()
    order.learn(0, replace(_ALIKE, peak_bytes=90 * _GIB))
    assert _next(order) == [3, 1, 2]  # of the other policy nothing nearer is known
    order.learn(2, replace(_ALIKE, peak_bytes=60 * _GIB))
    assert _next(order) == [2, 3, 1]


def test_the_mean_over_recipes_alike_corrects_time() -> None:
    order = _order()
    before = order.places()[1]
    for step_us in (1.2e6, 1.4e6):
        order.learn(0, replace(_ALIKE, step_us=step_us))
    assert order.places()[1] == pytest.approx(1.3 * before)
    assert order.places()[3] == 1e6 + 3


def test_the_best_of_several_machines_decides() -> None:
    small = replace(h100_sxm(), hbm_capacity_bytes=10 * _GIB)
    guess = Guess(recipe=_ALIKE.recipe, step_us=(1e6, 2e6), held_bytes=60 * _GIB)
    assert LearnedOrder([guess, None], [small, h100_sxm()]).places().tolist() == [2e6, math.inf]


def test_what_only_replicates_otherwise_than_one_that_is_under_way_comes_a_little_later() -> None:
    order = _order()
    before = order.places()
    order.begin(0)
    assert (order.places() / before).tolist() == pytest.approx([1.05, 1.05, 1, 1])
