"""The search of a plan, in children of this process: bounds, then simulations, best guess first.

A child captures one recipe, and simulates it and the other schedules that its capture serves. It
ends when it has told what it found, so that no capture burdens the next one. This process imports
everything once, has no thread and runs no graph, so that children can be forked from it.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait

from gt_config import ConfigError
from gt_passes.simulation import Hardware
from gt_pipeline.errors import GtPipelineError
from gt_pipeline.split import (
    TORCHTITAN_NAMING,
    find_schedule_layout,
    module_names_per_stage,
    pipeline_metadata,
)
from gt_trace.garbage_collection import held_garbage_collection
from gt_trainer.device import intended_for
from gt_trainer.dry_run.numbers_as_text import GIB
from gt_trainer.launcher.child import ChildFailedError, RunningChild
from gt_trainer.planning.candidates import PlanRequest, candidates
from gt_trainer.planning.guesses import guessed_bytes, guessed_us
from gt_trainer.planning.learned_order import Guess, LearnedOrder
from gt_trainer.planning.model_counts import (
    ModelCounts,
    PipelineLayout,
    StageParts,
    whole_model,
)
from gt_trainer.planning.recipe_config import recipe_config
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.search import Bounded, Frontier, WrongBoundError
from gt_trainer.planning.simulate_recipes import (
    Outcomes,
    capture_key,
    refused,
    simulate_recipes,
)
from gt_trainer.planning.step_bounds import StepBound, seen_by_bounds, step_bound
from gt_trainer.trainer import GraphTrainer

_MOST_CHILDREN = 4
"""Each holds up to 1.5 GB."""

_LOOKS_EVERY_SECONDS = 1.0
"""Whether its time is over."""

_WORTH_BESIDE = 1.4
"""By how much a guess may be above that of a recipe whose capture serves it too."""

_VARIANTS = 32
"""As many bounds are remembered: of schedules, precisions, and whether all is computed again."""

_Numbered = list[tuple[int, RunRecipe]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPlan:
    """What a search found, and what it did not look at."""

    machines: tuple[Hardware, ...]
    """The one that was asked for, then those that one might have."""

    outcomes: tuple[Outcomes, ...]
    """Of each simulated recipe on each machine, in the order in which they were found."""

    has_all_candidates: bool
    """Whether the space was enumerated to its end: else candidates are but the first ones."""

    num_candidates: int
    num_without_memory: int
    """Whose parameters and states alone are more than a GPU has, on every machine."""

    num_cut: int
    """Whose bound is above what was found, those without memory included."""

    num_left: int
    """That could still be better: time was up, or enough was found."""

    least_us: float | None
    """By its bounds no candidate takes less on the first machine.

    None if none can fit, or not all are known.
    """

    refusals: tuple[tuple[str, int], ...]
    """By why a run cannot have a recipe, how many that came up."""

    failures: tuple[Unsimulated, ...]
    seconds: float

    def ranked(self, machine: int = 0) -> list[RecipeOutcome]:
        """Recipes that fit, the fastest first."""
        of_machine = [each[machine] for each in self.outcomes if each[machine].fits]
        return sorted(of_machine, key=lambda each: each.step_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedRecipe:
    """A candidate before it is simulated."""

    recipe: RunRecipe
    bounds_us: tuple[float, ...]
    """On each machine; infinite where it cannot fit."""

    least_bytes: int
    """That it holds by its bounds."""

    guess: Guess | None
    """None for what fits on no machine: nobody asks for it, and of many recipes it is dear."""

    @property
    def could_fit(self) -> bool:
        """On the first machine."""
        return math.isfinite(self.bounds_us[0])


@dataclass(slots=True)
class _Found:
    least_bytes: Sequence[int]
    """That each candidate holds by its bounds."""

    order: LearnedOrder
    outcomes: list[Outcomes] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Unsimulated] = field(default_factory=list)

    @property
    def num_fitting(self) -> int:
        """Of outcomes on the first machine."""
        return sum(first.fits for first, *_ in self.outcomes)


def search_plan(
    base: GraphTrainer.Config,
    model: ModelCounts,
    request: PlanRequest,
    machines: Sequence[Hardware],
    *,
    asked: Collection[str] = (),
    seconds: float,
    enough: float = math.inf,
    tell: Callable[[str], None] = lambda line: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SearchedPlan:
    """Search until nothing is left that could be better, or time is up.

    Args:
        base: with the flags that every recipe has. Not changed.
        model: its counts.
        request: what is planned.
        machines: the first is what is planned for; the others are looked at beside it.
        asked: the flags of ``base`` that the user gave.
        seconds: for which to search; what is not done by then is left.
        enough: after so many recipes that fit on the first machine nothing more is begun.
        tell: is told, once in a while, what has been found.
        is_stopped: asked once in a while: True ends the search as if time were up.
    """
    begin = time.monotonic()

    def is_over() -> bool:
        return is_stopped() or time.monotonic() >= begin + seconds

    has_all = False

    def recipes() -> Iterator[RunRecipe]:
        nonlocal has_all
        for recipe in candidates(request, model):
            if is_stopped():
                return
            yield recipe
        has_all = True

    with held_garbage_collection():
        bounded = list(bounded_candidates(recipes(), model, machines))
    order = LearnedOrder([each.guess for each in bounded], machines)
    frontier = Frontier(
        Bounded(item=each.recipe, bounds=each.bounds_us, guess=place)
        for each, place in zip(bounded, order.places().tolist(), strict=True)
    )
    found = _Found(least_bytes=[each.least_bytes for each in bounded], order=order)
    with intended_for("cuda"):
        batches = _batches(frontier, base, asked, found, is_over, enough)
        _simulate(batches, frontier, base, machines, asked, found, is_over, tell)
    could_fit = [each.bounds_us[0] for each in bounded if each.could_fit]
    return SearchedPlan(
        machines=tuple(machines),
        outcomes=tuple(found.outcomes),
        has_all_candidates=has_all,
        num_candidates=frontier.num_candidates,
        num_without_memory=sum(each.guess is None for each in bounded),
        num_cut=frontier.num_cut,
        num_left=frontier.num_left,
        least_us=min(could_fit, default=None) if has_all else None,
        refusals=tuple(found.refusals.most_common()),
        failures=tuple(found.failures),
        seconds=time.monotonic() - begin,
    )


def bounded_candidates(
    recipes: Iterable[RunRecipe], model: ModelCounts, machines: Sequence[Hardware]
) -> Iterator[BoundedRecipe]:
    """Recipes whose stages exist, with their bounds and guesses on each machine."""
    layouts = PipelineLayouts(model)

    @functools.lru_cache(maxsize=_VARIANTS)  # recipes of the same degrees come one after another
    def bounds_of(seen: RunRecipe) -> list[StepBound]:
        return [step_bound(seen, model, layouts.of(seen), machine) for machine in machines]

    for recipe in recipes:
        try:
            layout = layouts.of(recipe)
        except GtPipelineError:
            continue
        bounds = bounds_of(seen_by_bounds(recipe))
        costs = tuple(
            bound.step_us if bound.peak_bytes <= machine.hbm_capacity_bytes else math.inf
            for bound, machine in zip(bounds, machines, strict=True)
        )
        guess = None
        if any(map(math.isfinite, costs)):
            guess = Guess(
                recipe=recipe,
                step_us=tuple(
                    guessed_us(recipe, model, layout, bound, machine)
                    for bound, machine in zip(bounds, machines, strict=True)
                ),
                held_bytes=guessed_bytes(recipe, model, layout, bounds[0]),
            )
        yield BoundedRecipe(
            recipe=recipe,
            bounds_us=costs,
            least_bytes=bounds[0].peak_bytes,
            guess=guess,
        )


def _batches(
    frontier: Frontier[RunRecipe],
    base: GraphTrainer.Config,
    asked: Collection[str],
    found: _Found,
    is_over: Callable[[], bool],
    enough: float,
) -> Iterator[_Numbered]:
    """What one child after another is to simulate: a recipe that a run may have, and its like."""
    ordered = None
    while not is_over() and found.num_fitting < enough:
        places = found.order.places()
        if places is not ordered:  # a refusal changes no place
            frontier.reorder(places)
            ordered = places
        taken = frontier.take()
        if taken is None:
            return
        number, recipe = taken
        try:
            recipe_config(base, recipe, asked=asked)
        except ConfigError as error:
            frontier.record(number, [math.inf] * frontier.num_goals)
            found.refusals[refused(recipe, error).reason] += 1
            continue
        found.order.begin(number)
        yield [(number, recipe), *_sharing_capture(number, recipe, frontier, found.order)]


def _sharing_capture(
    number: int, recipe: RunRecipe, frontier: Frontier[RunRecipe], order: LearnedOrder
) -> _Numbered:
    """Taken beside a recipe: other schedules of its stages that are thought to come soon."""
    if recipe.schedule is None:
        return []
    places = order.places()
    key, latest = capture_key(recipe), _WORTH_BESIDE * places[number]

    def is_wanted(other_number: int, other: RunRecipe) -> bool:
        is_near = other.pp == recipe.pp and other.dp_shard == recipe.dp_shard
        return is_near and capture_key(other) == key and bool(places[other_number] <= latest)

    return frontier.take_also(is_wanted)


def _simulate(
    batches: Iterator[_Numbered],
    frontier: Frontier[RunRecipe],
    base: GraphTrainer.Config,
    machines: Sequence[Hardware],
    asked: Collection[str],
    found: _Found,
    is_over: Callable[[], bool],
    tell: Callable[[str], None],
) -> None:
    num_children = min(_MOST_CHILDREN, len(os.sched_getaffinity(0)))
    running: dict[RunningChild[list[Outcomes | Unsimulated]], _Numbered] = {}
    try:
        while not is_over():
            while len(running) < num_children and (batch := next(batches, None)) is not None:
                work = partial(
                    simulate_recipes, base, [each for _, each in batch], machines, asked=asked
                )
                running[RunningChild(work)] = batch
            if not running:
                return
            ready = wait([child.receiver for child in running], timeout=_LOOKS_EVERY_SECONDS)
            if is_over():
                return
            for child in [each for each in running if each.receiver in ready]:
                _take_results(child, running.pop(child), frontier, found, tell)
    finally:
        for child, batch in running.items():
            child.kill()
            for number, _ in batch:
                frontier.put_back(number)


def _take_results(
    child: RunningChild[list[Outcomes | Unsimulated]],
    batch: _Numbered,
    frontier: Frontier[RunRecipe],
    found: _Found,
    tell: Callable[[str], None],
) -> None:
    nothing = [math.inf] * frontier.num_goals
    try:
        results = child.result()
    except ChildFailedError as error:
        results = [
            Unsimulated(recipe=recipe, reason=error.reason, is_refused=False) for _, recipe in batch
        ]
    for (number, _), result in zip(batch, results, strict=True):
        if not isinstance(result, Unsimulated):
            try:
                _check_memory(result[0], found.least_bytes[number])
                frontier.record(number, [o.step_us if o.fits else math.inf for o in result])
            except WrongBoundError as error:
                reason = f"its bounds were wrong: {error}"
                found.failures.append(
                    Unsimulated(recipe=result[0].recipe, reason=reason, is_refused=False)
                )
                tell(f"failed: {result[0].recipe}: {reason}")
                continue
            found.outcomes.append(result)
            tell(_line(result[0], found.order.thought(number)))
            found.order.learn(number, result[0])
            continue
        frontier.record(number, nothing)
        if result.is_refused:
            found.refusals[result.reason] += 1
        else:
            found.failures.append(result)
            tell(f"failed: {result.recipe}: {result.reason}")


def _check_memory(outcome: RecipeOutcome, least_bytes: int) -> None:
    if outcome.peak_bytes < least_bytes:
        raise WrongBoundError(
            f"{outcome.recipe} holds {outcome.peak_bytes:,} bytes, and its bound is {least_bytes:,}"
        )


def _line(outcome: RecipeOutcome, thought: Guess) -> str:
    fits = "" if outcome.fits else ", DOES NOT FIT"
    found = f"{outcome.step_us / 1000:,.0f} ms, {outcome.peak_bytes / GIB:.1f} GiB{fits}"
    guess = f"{thought.step_us[0] / 1000:,.0f} and {thought.held_bytes / GIB:.1f}"
    return f"{found} (guessed {guess}): {outcome.recipe}"


# Which layers each stage of a pipeline has, as a run divides them by default.
class PipelineLayouts:
    """The layouts of one model, each made once.

    Args:
        model: the model.
    """

    def __init__(self, model: ModelCounts) -> None:
        self._model = model
        self._known: dict[tuple[str, int], PipelineLayout] = {}
        self._whole = whole_model(model)

    def of(self, recipe: RunRecipe) -> PipelineLayout:
        """The stages of a recipe.

        Raises:
            GtPipelineError: the model has too few layers for them.
        """
        if recipe.schedule is None:
            return self._whole
        key = recipe.schedule, recipe.pp
        if key not in self._known:
            self._known[key] = _layout(self._model, *key)
        return self._known[key]


def _layout(model: ModelCounts, schedule: str, pp: int) -> PipelineLayout:
    num_layers = len(model.layers)
    metadata = pipeline_metadata(num_layers, schedule=schedule, pp_degree=pp)
    names = module_names_per_stage(
        num_layers, num_stages=metadata.num_stages, naming=TORCHTITAN_NAMING
    )
    stages, begin = [], 0
    for index, modules in enumerate(names):
        end = begin + sum(name.startswith("layers.") for name in modules)
        stages.append(
            StageParts.of(
                model,
                range(begin, end),
                has_embedding=index == 0,
                has_output=index == metadata.num_stages - 1,
            )
        )
        begin = end
    is_v = find_schedule_layout(schedule).style == "v"
    ranks = [*range(pp), *reversed(range(pp))] if is_v else [*range(pp)] * metadata.stages_per_rank
    by_rank = [tuple(stage for stage, of in enumerate(ranks) if of == rank) for rank in range(pp)]
    return PipelineLayout(stages=tuple(stages), by_rank=tuple(by_rank))
