"""In which order recipes are simulated: by guesses, which those that were simulated correct.

A guess is wrong in the same way for recipes alike: what one of them took and held, over what was
guessed, corrects those that are left. So when one does not fit, those come next that hold less,
by stronger recomputation, more stages or a smaller microbatch, and not its neighbours.

A plan may have time for few. So until one is known to fit on a machine, those come first that hold
clearly less than it has. Any one ends this, for then the plan has an answer; it says nothing of
guesses at other policies, which what is simulated of them corrects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from gt_passes.simulation import Hardware
from gt_trainer.planning.guesses import order
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe

_AGAIN = 1.05
"""Of a recipe that only replicates otherwise than one before it: the others come sooner."""

_Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What a recipe is thought to take and to hold."""

    recipe: RunRecipe
    step_us: tuple[float, ...]
    """On each machine."""

    held_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Correction:
    """What was simulated over what was guessed."""

    step_us: float = 1.0
    held_bytes: float = 1.0


class LearnedOrder:
    """The places of recipes in the order, which what is simulated changes.

    Args:
        guesses: of all recipes; None for one that is never asked for.
        machines: to simulate each on.
    """

    def __init__(self, guesses: Sequence[Guess | None], machines: Sequence[Hardware]) -> None:
        self._guesses = guesses
        self._machines = machines
        self._held_bytes = np.array([0.0 if each is None else each.held_bytes for each in guesses])
        nowhere = (math.inf,) * len(machines)
        times = [nowhere if each is None else each.step_us for each in guesses]
        self._step_us = np.array(times).reshape(-1, len(machines))
        self._examples: dict[_Kind, RunRecipe] = {}
        """A recipe of each finest kind, which are numbered in this order."""

        numbers: dict[_Kind, int] = {}
        alike = []
        for each in guesses:
            if each is None:
                alike.append((0,) * 6)
                continue
            recipe, kind = each.recipe, _finest(each.recipe)
            self._examples.setdefault(kind, recipe)
            number = numbers.setdefault(kind, len(numbers))
            alike.append((number, recipe.pp, recipe.tp, recipe.cp, recipe.ep, recipe.microbatch))
        self._alike = np.array(alike, dtype=np.int32).reshape(-1, 6)
        """Equal for recipes that differ in how many of their shards are replicas; kinds first."""

        self._is_begun = np.zeros(len(guesses), dtype=np.bool_)
        self._is_proven = [False] * len(machines)
        """Whether something is known to fit, on each."""

        self._seen: dict[_Kind, list[_Correction]] = {}
        self._places: NDArray[np.float64] | None = None

    def places(self) -> NDArray[np.float64]:
        """Of all recipes: less for those that come sooner."""
        if self._places is None:
            known = [self._correction(each) for each in self._examples.values()] or [_Correction()]
            kinds = self._alike[:, 0]
            held_bytes = self._held_bytes * np.array([each.held_bytes for each in known])[kinds]
            factors = np.array([each.step_us for each in known])[kinds]
            self._places = np.where(self._is_begun, _AGAIN, 1.0) * np.min(
                [
                    order(step_us * factors, held_bytes, machine, is_proven=is_proven)
                    for step_us, machine, is_proven in zip(
                        self._step_us.T, self._machines, self._is_proven, strict=True
                    )
                ],
                axis=0,
            )
        return self._places

    def thought(self, number: int) -> Guess:
        """What a recipe is thought to take by now."""
        guess = self._guess(number)
        known = self._correction(guess.recipe)
        return Guess(
            recipe=guess.recipe,
            step_us=tuple(step_us * known.step_us for step_us in guess.step_us),
            held_bytes=guess.held_bytes * known.held_bytes,
        )

    def begin(self, number: int) -> None:
        """A recipe is to be simulated: from others like it little more is to be learned."""
        self._is_begun |= (self._alike == self._alike[number]).all(axis=1)
        self._places = None

    def learn(self, number: int, outcome: RecipeOutcome) -> None:
        """What was simulated on the first machine; it holds as much on the others."""
        guess = self._guess(number)
        found = _Correction(
            step_us=outcome.step_us / guess.step_us[0],
            held_bytes=outcome.peak_bytes / guess.held_bytes,
        )
        for kind in _kinds(guess.recipe):
            self._seen.setdefault(kind, []).append(found)
        for place, machine in enumerate(self._machines):
            self._is_proven[place] |= outcome.peak_bytes <= machine.hbm_capacity_bytes
        self._places = None

    def _guess(self, number: int) -> Guess:
        guess = self._guesses[number]
        assert guess is not None  # it fits nowhere, and is never taken
        return guess

    def _correction(self, recipe: RunRecipe) -> _Correction:
        """Of those most alike that were simulated."""
        kind = next((each for each in _kinds(recipe) if each in self._seen), None)
        if kind is None:
            return _Correction()
        seen = self._seen[kind]
        return _Correction(
            step_us=fmean(each.step_us for each in seen),
            held_bytes=fmean(each.held_bytes for each in seen),
        )


def _finest(recipe: RunRecipe) -> _Kind:
    how = (recipe.memory_policy, recipe.ep_overlap, recipe.reduces_once, recipe.linears)
    return recipe.schedule, recipe.tp > 1, recipe.cp > 1, *how


def _kinds(recipe: RunRecipe) -> tuple[_Kind, ...]:
    """From what is most alike to what is hardly."""
    return _finest(recipe), (recipe.schedule, recipe.memory_policy), (recipe.schedule is None,)
