"""In which order recipes are simulated: by guesses, which those that were simulated correct.

A guess is wrong in the same way for recipes alike: what one of them took and held, over what was
guessed, corrects those that are left. So when one does not fit, those come next that hold less,
by stronger recomputation, more stages or a smaller microbatch, and not its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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


def first_place(guess: Guess, machines: Sequence[Hardware]) -> float:
    """Its place before anything was simulated: on the machine where it comes soonest."""
    return min(
        order(step_us, guess.held_bytes, machine)
        for step_us, machine in zip(guess.step_us, machines, strict=True)
    )


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
        self._seen: dict[_Kind, list[_Correction]] = {}
        self._means: dict[_Kind, _Correction] = {}
        self._begun: set[_Kind] = set()
        self._is_changed = False

    def place(self, number: int) -> float:
        """Less for those that come sooner."""
        thought = self.thought(number)
        place = first_place(thought, self._machines)
        return place * _AGAIN if _but_for_replicas(thought.recipe) in self._begun else place

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
        self._begun.add(_but_for_replicas(self._guess(number).recipe))
        self._is_changed = True

    def has_changed(self) -> bool:
        """Whether places are others than when this was asked last."""
        is_changed, self._is_changed = self._is_changed, False
        return is_changed

    def learn(self, number: int, outcome: RecipeOutcome) -> None:
        """What was simulated on the first machine."""
        guess = self._guess(number)
        found = _Correction(
            step_us=outcome.step_us / guess.step_us[0],
            held_bytes=outcome.peak_bytes / guess.held_bytes,
        )
        for kind in _kinds(guess.recipe):
            self._seen.setdefault(kind, []).append(found)
        self._means.clear()
        self._is_changed = True

    def _guess(self, number: int) -> Guess:
        guess = self._guesses[number]
        assert guess is not None  # it fits nowhere, and is never taken
        return guess

    def _correction(self, recipe: RunRecipe) -> _Correction:
        """Of those most alike that were simulated."""
        finest = _finest(recipe)
        if finest not in self._means:
            kind = next((each for each in _kinds(recipe) if each in self._seen), None)
            seen = [_Correction()] if kind is None else self._seen[kind]
            self._means[finest] = _Correction(
                step_us=fmean(each.step_us for each in seen),
                held_bytes=fmean(each.held_bytes for each in seen),
            )
        return self._means[finest]


def _but_for_replicas(recipe: RunRecipe) -> _Kind:
    """The same for recipes that differ in how many of their shards are replicas."""
    degrees = (recipe.pp, recipe.tp, recipe.cp, recipe.ep, recipe.microbatch)
    return *degrees, *_finest(recipe)


def _finest(recipe: RunRecipe) -> _Kind:
    how = (recipe.memory_policy, recipe.ep_overlap, recipe.reduces_once, recipe.linears)
    return recipe.schedule, recipe.tp > 1, recipe.cp > 1, *how


def _kinds(recipe: RunRecipe) -> tuple[_Kind, ...]:
    """From what is most alike to what is hardly."""
    return _finest(recipe), (recipe.schedule, recipe.memory_policy), (recipe.schedule is None,)
