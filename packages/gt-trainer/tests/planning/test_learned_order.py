"""What was simulated changes which recipe is next."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from planning.outcomes import outcome

from gt_passes.simulation import h100_sxm
from gt_trainer.planning.guesses import _SURE
from gt_trainer.planning.learned_order import Guess, LearnedOrder

_GIB = 2**30
_CAPACITY = h100_sxm().hbm_capacity_bytes
_ALIKE = outcome(8, ms=1000.0, gib=50)
_OTHER_POLICY = replace(_ALIKE.recipe, memory_policy="full_recompute")
_PIPELINE = replace(_ALIKE.recipe, pp=2, schedule="1F1B")


def _order() -> LearnedOrder:
    recipes = (_ALIKE.recipe, replace(_ALIKE.recipe, dp_shard=16), _OTHER_POLICY, _PIPELINE)
    guesses = [
        Guess(recipe=each, step_us=(1e6 + number,), held_bytes=50 * _GIB)
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
    order.learn(2, replace(_ALIKE, peak_bytes=50 * _GIB))
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
    guess = Guess(recipe=_ALIKE.recipe, step_us=(1e6, 2e6), held_bytes=50 * _GIB)
    assert LearnedOrder([guess, None], [small, h100_sxm()]).places().tolist() == [2e6, math.inf]


def test_what_only_replicates_otherwise_than_one_that_is_under_way_comes_a_little_later() -> None:
    order = _order()
    before = order.places()
    order.begin(0)
    order.learn(0, replace(_ALIKE, step_us=1e6, peak_bytes=50 * _GIB))
    assert (order.places() / before).tolist() == pytest.approx([1.05, 1.05, 1, 1])


def test_what_holds_clearly_less_comes_first_until_something_fits() -> None:
    recipes = [replace(_ALIKE.recipe, dp_shard=2**number) for number in range(3)]
    guesses = [
        Guess(recipe=each, step_us=(step_us,), held_bytes=part * _CAPACITY)
        for each, step_us, part in zip(
            recipes, (1e6, 1.2e6, 1.1e6), (0.88, 0.68, 0.75), strict=True
        )
    ]
    order = LearnedOrder(guesses, [h100_sxm()])
    assert order.places().argsort().tolist() == [1, 2, 0]
    order.learn(1, replace(_ALIKE, step_us=1.2e6, peak_bytes=int(0.68 * _CAPACITY)))
    assert order.places().argsort().tolist() == [0, 2, 1]


def test_what_fits_the_larger_machine_alone_proves_nothing_of_the_smaller() -> None:
    small = replace(h100_sxm(), hbm_capacity_bytes=40 * _GIB)
    recipes = [replace(_ALIKE.recipe, dp_shard=2**number) for number in range(3)]
    guesses = [
        Guess(recipe=each, step_us=(step_us, 1e9), held_bytes=part * 40 * _GIB)
        for each, step_us, part in zip(recipes, (1e6, 1.2e6, 3e6), (0.88, 0.68, 1.0), strict=True)
    ]
    for machines, held, nearest in (
        ([small, h100_sxm()], 70, 1),  # only on the second one
        ([small, h100_sxm()], 40, 0),
    ):
        order = LearnedOrder(guesses, machines)
        order.learn(2, replace(_ALIKE, step_us=3e6, peak_bytes=held * _GIB))
        order._seen.clear()  # what it corrects is tested above
        assert order.places().argmin() == nearest


def test_what_fits_the_second_machine_alone_proves_it_there() -> None:
    small = replace(h100_sxm(), hbm_capacity_bytes=40 * _GIB)
    recipes = [replace(_ALIKE.recipe, dp_shard=2**number) for number in range(3)]
    guesses = [
        Guess(recipe=each, step_us=(1e9, step_us), held_bytes=part * _CAPACITY)
        for each, step_us, part in zip(recipes, (1e6, 1.2e6, 3e6), (0.88, 0.68, 0.9), strict=True)
    ]
    order = LearnedOrder(guesses, [small, h100_sxm()])
    assert order.places().argmin() == 1
    held = int(0.9 * _CAPACITY)
    order.learn(2, replace(_ALIKE, step_us=1e9, peak_bytes=held, capacity_bytes=40 * _GIB))
    assert order.places().argmin() == 0


_POLICIES = {"save_all": 1.2, "selective": 0.8, "selective_alternate": 0.6, "full_recompute": 0.3}
"""Of a device, what they are thought to hold of the larger microbatch."""


def _world(seed: int) -> tuple[list[Guess], list[tuple[float, int]]]:
    """Guesses, and what is true.

    Recipes of one schedule and policy are wrong alike, +-10 %: by up to 1.9 in time, and in memory by
    1.3 to 1.8 unless all is computed again. That is more than a first recipe's margin, which is a
    choice. Of 50 such worlds this many had no recipe that fits after 1, 2 and 3 were simulated: by
    a margin of 0.9 23, 7, 5; 0.8 20, 4, 4; 0.7 10, 2, 0; 0.6 3, 1, 0; 0.5 0, 0, 0. A smaller one
    puts off more of what would fit.
    """
    draw = random.Random(seed)
    wrong: dict[object, tuple[float, float]] = {}
    guesses, truths = [], []
    for policy, overlap, microbatch, schedule, cp in itertools.product(
        _POLICIES, (False, True), (1, 2), (None, "1F1B", "DualPipeV"), (2, 4, 8)
    ):
        again = policy == "full_recompute"
        time, memory = wrong.setdefault(
            (policy, schedule), (draw.uniform(0.9, 1.9), 1.0 if again else draw.uniform(1.3, 1.8))
        )
        recipe = replace(
            _ALIKE.recipe,
            cp=cp,
            pp=1 if schedule is None else 2,
            schedule=schedule,
            memory_policy=policy,
            ep_overlap=overlap,
            microbatch=microbatch,
        )
        step_us = 1e6 * draw.uniform(0.8, 1.2) * (1.3 if again else 1.0)
        held = _CAPACITY * (0.1 + _POLICIES[policy] * microbatch / 2 * draw.uniform(0.8, 1.2))
        guesses.append(Guess(recipe=recipe, step_us=(step_us,), held_bytes=held))
        truths.append(
            (step_us * time * draw.uniform(0.9, 1.1), int(held * memory * draw.uniform(0.9, 1.1)))
        )
    return guesses, truths


def _fitting(seed: int, most: int) -> list[float]:
    """Steps of the first recipes that fit, two simulated at once."""
    guesses, truths = _world(seed)
    order = LearnedOrder(guesses, [h100_sxm()])
    left, under_way, found = set(range(len(guesses))), list[int](), list[float]()
    for _ in range(most):
        while len(under_way) < 2:
            number = min(left, key=order.places().__getitem__)
            left.remove(number)
            under_way.append(number)
            order.begin(number)
        number = under_way.pop(0)
        step_us, held = truths[number]
        order.learn(number, replace(_ALIKE, step_us=step_us, peak_bytes=held))
        if held <= _CAPACITY:
            found.append(step_us)
    return found


def test_a_plan_with_time_for_few_recipes_ends_with_one_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_one(most: int) -> int:
        return sum(not _fitting(seed, most) for seed in range(50))

    assert without_one(3) == 0
    first = without_one(1)
    monkeypatch.setitem(_SURE, False, _SURE[True])
    assert 2 * first < without_one(1), "a margin is worth it"
