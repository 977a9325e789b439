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
from gt_trainer.planning.model_counts import (
    ModelCounts,
    PipelineLayout,
    StageParts,
    whole_model,
)
from gt_trainer.planning.recipe_outcome import RecipeOutcome, Unsimulated, ranked
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.search import BoundedCandidate, Frontier, WrongBoundError
from gt_trainer.planning.simulate_recipes import (
    Outcomes,
    capture_key,
    recipe_config,
    refusal,
    simulate_recipes,
)
from gt_trainer.planning.step_bounds import StepBound, seen_by_bounds, step_bound
from gt_trainer.trainer import GraphTrainer

_MOST_CHILDREN = 4
"""Each holds up to 1.5 GB."""

_LOOKS_EVERY_SECONDS = 1.0
"""Whether its time is over."""

_WORTH_BESIDE = 1.4
"""Largest ratio of places in the order at which another schedule shares a capture."""

_VARIANTS = 32
"""Number of bounds in the cache: of schedules, precisions, and recomputation."""

_Batch = dict[int, tuple[RunRecipe, GraphTrainer.Config]]
"""Recipes that share a capture, with their configurations, by their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPlan:
    """The results of a search, and the numbers of candidates that it cut or left."""

    machines: tuple[Hardware, ...]
    """The machine of the plan, then those of ``--what-if``."""

    outcomes: tuple[Outcomes, ...]
    """Outcomes of each simulated recipe on each machine, in the order of the search."""

    has_all_candidates: bool
    """Whether the space was enumerated to its end: else candidates are but the first ones."""

    num_candidates: int
    num_without_memory: int
    """Number of candidates whose least memory is more than a GPU of any machine has."""

    num_cut: int
    """Number of candidates that bounds cut, those without memory included."""

    num_left: int
    """Number of candidates that could still be faster: time was up, or enough was found."""

    least_us: float | None
    """Least bound of all candidates on the first machine.

    None if none can fit, or not all are known.
    """

    refusals: tuple[tuple[str, int], ...]
    """Reasons for which a run cannot have a recipe, and their numbers."""

    failures: tuple[Unsimulated, ...]
    seconds: float

    def ranked(self, machine: int = 0) -> list[RecipeOutcome]:
        """Recipes that fit, the fastest first."""
        return ranked(each[machine] for each in self.outcomes)


@dataclass(slots=True)
class _Found:
    outcomes: list[Outcomes] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Unsimulated] = field(default_factory=list)

    @property
    def num_fitting(self) -> int:
        """Number of outcomes that fit on the first machine."""
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
        tell: called with a line for each result.
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
        capacities = [each.hbm_capacity_bytes for each in machines]
        frontier = Frontier(bounded_candidates(recipes(), model, machines), capacities)
    found = _Found()
    with intended_for("cuda"):
        batches = _batches(frontier, base, asked, found, is_over, enough)
        _simulate(batches, frontier, machines, found, is_over, tell)
    bounds = [each.bounds_us for each in frontier.candidates]
    return SearchedPlan(
        machines=tuple(machines),
        outcomes=tuple(found.outcomes),
        has_all_candidates=has_all,
        num_candidates=len(frontier.candidates),
        num_without_memory=sum(min(each) == math.inf for each in bounds),
        num_cut=frontier.num_cut,
        num_left=frontier.num_left,
        least_us=_finite(min((each[0] for each in bounds), default=math.inf)) if has_all else None,
        refusals=tuple(found.refusals.most_common()),
        failures=tuple(found.failures),
        seconds=time.monotonic() - begin,
    )


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def bounded_candidates(
    recipes: Iterable[RunRecipe], model: ModelCounts, machines: Sequence[Hardware]
) -> Iterator[BoundedCandidate[RunRecipe]]:
    """Yield recipes whose stages exist, with their bounds and guesses on each machine."""
    layouts = PipelineLayouts(model)
    known: dict[tuple[object, ...], tuple[object, ...]] = {}  # of many recipes a few kinds

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
        if min(costs) == math.inf:  # many recipes fit on no machine, and guesses are expensive
            yield BoundedCandidate(item=recipe, bounds_us=costs, guesses_us=costs)
            continue
        how = (recipe.memory_policy, recipe.ep_overlap, recipe.reduces_once, recipe.linears)
        kind = (recipe.schedule, recipe.tp > 1, recipe.cp > 1, *how)
        kinds: tuple[object, ...] = (
            kind,
            (recipe.schedule, recipe.memory_policy),
            recipe.schedule is None,
        )
        kinds = known.setdefault(kinds, kinds)
        yield BoundedCandidate(
            item=recipe,
            bounds_us=costs,
            least_bytes=bounds[0].peak_bytes,
            guesses_us=tuple(
                guessed_us(recipe, model, layout, bound, machine)
                for bound, machine in zip(bounds, machines, strict=True)
            ),
            guess_bytes=guessed_bytes(recipe, model, layout, bounds[0]),
            kinds=kinds,
            family=(kinds, recipe.pp, recipe.tp, recipe.cp, recipe.ep, recipe.microbatch),
        )


def _batches(
    frontier: Frontier[RunRecipe],
    base: GraphTrainer.Config,
    asked: Collection[str],
    found: _Found,
    is_over: Callable[[], bool],
    enough: float,
) -> Iterator[_Batch]:
    """Yield the work of one child after another: a recipe that a run may have, and similar ones.

    The similar ones are other schedules of its stages, which its capture serves too.
    """
    while not is_over() and found.num_fitting < enough:
        taken = frontier.take()
        if taken is None:
            return
        batch: _Batch = {}
        recipes = [taken]
        for number, recipe in recipes:
            try:
                batch[number] = recipe, recipe_config(base, recipe, asked=asked)
            except ConfigError as error:
                found.refusals[refusal(error)] += 1
                continue
            if number == taken[0]:
                recipes += frontier.begin(number, _shares_capture(recipe), within=_WORTH_BESIDE)
        if batch:
            yield batch


def _shares_capture(recipe: RunRecipe) -> Callable[[RunRecipe], bool]:
    key = capture_key(recipe)

    def shares(other: RunRecipe) -> bool:
        is_near = other.pp == recipe.pp > 1 and other.dp_shard == recipe.dp_shard
        return is_near and capture_key(other) == key

    return shares


def _simulate(
    batches: Iterator[_Batch],
    frontier: Frontier[RunRecipe],
    machines: Sequence[Hardware],
    found: _Found,
    is_over: Callable[[], bool],
    tell: Callable[[str], None],
) -> None:
    num_children = min(_MOST_CHILDREN, len(os.sched_getaffinity(0)))
    running: dict[RunningChild[list[Outcomes]], _Batch] = {}
    try:
        while not is_over():
            while len(running) < num_children and (batch := next(batches, None)) is not None:
                work = partial(simulate_recipes, dict(batch.values()), machines)
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
            for number in batch:
                frontier.put_back(number)


def _take_results(
    child: RunningChild[list[Outcomes]],
    batch: _Batch,
    frontier: Frontier[RunRecipe],
    found: _Found,
    tell: Callable[[str], None],
) -> None:
    def fail(recipe: RunRecipe, reason: str) -> None:
        found.failures.append(Unsimulated(recipe=recipe, reason=reason))
        tell(f"failed: {recipe}: {reason}")

    try:
        results = child.result()
    except ChildFailedError as error:
        for recipe, _ in batch.values():
            fail(recipe, error.reason)
        return
    for (number, (recipe, _)), outcomes in zip(batch.items(), results, strict=True):
        line = _line(outcomes[0], *frontier.expected(number))
        try:
            frontier.record(number, [(each.step_us, each.peak_bytes) for each in outcomes])
        except WrongBoundError as error:
            fail(recipe, f"its bounds were wrong: {error}")
            continue
        found.outcomes.append(outcomes)
        tell(line)


def _line(outcome: RecipeOutcome, guess_us: float, guess_bytes: float) -> str:
    fits = "" if outcome.fits else ", DOES NOT FIT"
    found = f"{outcome.step_us / 1000:,.0f} ms, {outcome.peak_bytes / GIB:.1f} GiB{fits}"
    guess = f"{guess_us / 1000:,.0f} and {guess_bytes / GIB:.1f}"
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
