"""The cheapest mixture (``mixtures``), with a bound for all of them.

A Lagrangian bound of a problem holds for its mixtures, too: at fixed prices of windows and memory
things are alike and independent of each other, each takes what is cheapest, and so may all. The
same is true of the linear relaxation. Bounds by branching or by a MILP would not hold. An option is
dropped if a mixture in which a single thing takes it is too dear (``Node.bounds_of_one``).

So prices and bound come as in ``search`` from linear programs over promising options and dual
ascent in turns. What an LP mixes are the variants (Dantzig and Wolfe 1960): a small MILP counts how
many things take which. It loses what one thing makes of a difference, where a choice for all things
would lose n times as much. No step depends on time unless it ends the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.bounding import (
    Bounding,
    SearchPart,
    SearchSettings,
    with_settled_windows,
)
from gt_autoparallel.solver.deadline import Deadline
from gt_autoparallel.solver.dominance import drop_dominated
from gt_autoparallel.solver.highs_model import HighsModel, HighsResult
from gt_autoparallel.solver.incumbent import Incumbent, less_by
from gt_autoparallel.solver.message_passing import Prices
from gt_autoparallel.solver.mixtures import Mixture, alike_mixture
from gt_autoparallel.solver.price_model import PriceModel
from gt_autoparallel.solver.problem import Problem
from gt_autoparallel.solver.reduced_problem import ReducedProblem, reduce_problem
from gt_autoparallel.solver.restricted_programs import RestrictedPrograms, weights_of_options
from gt_autoparallel.solver.rivals import Rival, beat_rivals
from gt_autoparallel.solver.solution import (
    MOST_CANDIDATES,
    Progress,
    ProgressCallback,
    WarmStart,
)
from gt_autoparallel.solver.solution import relative_gap as gap_between
from gt_autoparallel.solver.validation import check_blocks

_SWEEPS = 12
"""Sweeps of dual ascent after each LP, at most."""

_CLOSE = 0.2
"""Of the gap that is asked for: how far the bound may be from the LP when variants are counted."""

_RAISE = 4.0
"""By which prices of memory are multiplied while promising options keep no budget."""

_LEAST = 0.1
"""What as many bytes as a budget has cost at least before that, of what choices cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSolution:
    """The best mixture that was found, and how far from the best one it can be."""

    mixture: Mixture | None
    """None if none was found."""

    lower_bound_us: float
    """No mixture costs less; inf if forbidden pairs or budgets leave none."""

    gap: float
    """(objective - bound) / |objective|, at least 0; inf without a mixture."""

    seconds: float
    memory_prices: tuple[float, ...]
    """Dual of each memory row, us per byte."""

    warm_start: WarmStart
    """Where the search of a similar problem may begin."""


def solve_mixed(
    problem: Problem,
    *,
    relative_gap: float,
    time_limit_seconds: float,
    warm_start: WarmStart | None = None,
    rivals: Sequence[Rival] = (),
    progress: ProgressCallback | None = None,
    below_us: float = math.inf,
) -> MixedSolution:
    """Finds a cheap mixture that keeps the budgets, and bounds all mixtures from below.

    Args:
        problem: with blocks, which ``check_problem`` accepts.
        relative_gap: as for ``solve``. The search may end with a larger one: what is left between
            linear programs and mixtures is not branched.
        time_limit_seconds: after this the best mixture and bound yet are given.
        warm_start: as for ``solve``.
        rivals: parts of the problem, in which what is cheaper is looked for without branching.
        progress: as for ``solve``.
        below_us: the search ends once it is known that every mixture costs this or more.

    Raises:
        PlacementInputError: the blocks do not fit the problem.
    """
    check_blocks(problem)
    start = time.perf_counter()
    reduced = reduce_problem(problem, mixed=True)
    if make_arc_consistent(reduced) is not None:
        return _nothing(problem, start)
    reduced.compact_links()
    whole = reduced.copy()
    drop_dominated(reduced)
    reduced.compact_links()
    reduced.settle_windows()
    search = _MixedSearch(
        problem=problem,
        reduced=reduced,
        gap=relative_gap,
        deadline=Deadline(start + time_limit_seconds),
        settings=SearchSettings(),
        progress=progress,
        start=start,
        below_us=below_us,
    )
    if warm_start is not None:
        search.begin_at(warm_start)
    search.run()
    if search.lower_bound_us == math.inf:
        return _nothing(problem, start)
    if search.lower_bound_us < below_us:
        search.beat(rivals, whole)
    return search.solution()


@dataclass(slots=True)
class _MixedSearch:
    problem: Problem
    reduced: ReducedProblem
    gap: float
    deadline: Deadline
    settings: SearchSettings
    progress: ProgressCallback | None
    start: float
    below_us: float
    """What costs this or more is not looked for."""

    incumbent: Incumbent = field(init=False)
    """Its choices are the same for all things; it looks for nothing as dear as the best mixture."""

    programs: RestrictedPrograms = field(init=False)
    mixture: Mixture | None = None
    lower_bound_us: float = -math.inf
    part: SearchPart = field(init=False)
    _num_raised: int = 0
    """How often prices of memory were."""

    _bounding: Bounding = field(init=False)
    _rounds: int = field(init=False)
    _bound_prices: Prices = field(init=False)
    """Those of an LP, or at which the bound last rose."""

    def __post_init__(self) -> None:
        self.incumbent = Incumbent(self.problem, self.gap, PriceModel(problem=self.problem))
        self.programs = RestrictedPrograms(
            self.incumbent,
            self.settings,
            self.deadline.seconds_left,
            [set() for _ in self.problem.variables],
        )
        self._bounding = Bounding(
            self.problem, self.incumbent, self.settings, self.deadline.is_over
        )
        self._rounds = self.settings.rounds
        windows, rows = len(self.problem.windows), len(self.problem.memory)
        self.part = SearchPart(
            self.reduced, Prices(windows=np.ones(windows), memory=np.zeros(rows))
        )

    def begin_at(self, warm_start: WarmStart) -> None:
        """Takes what another solve learned; what does not fit this problem is left out."""
        for choices in warm_start.fitting_choices(self.problem):
            self.incumbent.offer(choices)
            self.programs.see(choices)
        prices = warm_start.fitting_prices(self.problem)
        if prices is not None:
            self.part.prices = with_settled_windows(self.reduced, prices)
            # Prices that are nearly right need no cutting planes: the LP corrects them.
            self._rounds //= 4

    def run(self) -> None:
        """Bounds and mixes in turns, until the gap is closed or nothing more helps."""
        part = self.part
        alive = self._bounding.ascend(part, self._rounds) and self._bounding.keep_budgets(part)
        self._bound_prices = part.prices
        alive = alive and self._turns()
        part.prices = with_settled_windows(part.reduced, self._bound_prices)
        # Whatever was dropped costs no less than the cutoff; inf if there is no mixture at all.
        cutoff = self.incumbent.cutoff_us
        self.lower_bound_us = min(part.lower_bound_us, cutoff) if alive else cutoff
        if alive and self._num_raised:
            # At such prices what has no mixture may have any bound, and that says nothing more.
            self.lower_bound_us = min(self.lower_bound_us, self.below_us)
        self._report("mixed")

    def _turns(self) -> bool:
        """False if nothing is left below the cutoff."""
        part = self.part
        # What it takes to find options that keep the budgets leaves as many turns as ever.
        for turn in range(2 * self.settings.relaxations):
            if self.deadline.is_over() or part.lower_bound_us >= self.below_us:
                return True
            if turn - self._num_raised == self.settings.relaxations:
                break
            result = self._relaxed()
            if result is None:
                if not self._raise_memory_prices():
                    return False
                continue
            if result.feasible is False:
                return False
            prices = Prices(windows=result.window_prices, memory=result.memory_prices)
            self._bound_prices = prices
            if not self._bounding.settle(part, prices, sweeps=_SWEEPS):
                return False
            distance = result.lower_bound_us - part.lower_bound_us
            scale = self.gap * abs(part.lower_bound_us)
            if (
                turn == self._num_raised and self._best_us() == math.inf
            ) or distance <= _CLOSE * scale:
                self._mix(self.settings.mixture_pairs[0])
                if part.lower_bound_us >= self.incumbent.cutoff_us:
                    return False
            self._report("LP of promising options")
            room = self.incumbent.cutoff_us - part.lower_bound_us
            if distance <= min(0.02 * room, _CLOSE * scale):
                break
        for pairs in self.settings.mixture_pairs[1:]:
            if self.deadline.is_over() or not part.weights:
                break
            self._mix(pairs)
            if part.lower_bound_us >= self.incumbent.cutoff_us:
                return False
        return True

    def _relaxed(self) -> HighsResult | None:
        """The LP over promising options, or over all if they are few: then it bounds, too."""
        part = self.part
        if part.reduced.num_pairs > self.settings.small_pairs:
            return self.programs.relax(part)
        result = HighsModel(part.reduced).solve(integer=False, seconds=self.deadline.seconds_left())
        if result.feasible is False:
            return result
        if not result.optimal:
            return None
        part.weights = weights_of_options(part.reduced, result)
        self.programs.take(part.reduced, result)
        part.lower_bound_us = max(part.lower_bound_us, result.lower_bound_us)
        return result

    def _raise_memory_prices(self) -> bool:
        """Makes promising what exceeds the budgets least; False if nothing is left to look for.

        Such prices are guesses: they outlive the search only if they raise the bound.
        """
        self._num_raised += 1
        part, cuts = self.part, self.incumbent.price_model.cuts
        usual = np.median([abs(cut.constant) for cut in cuts]) if cuts else 0.0
        scale = max(part.lower_bound_us, float(usual))
        budgets = np.array([row.budget_bytes for row in self.problem.memory])
        memory = _RAISE * np.maximum(part.prices.memory, _LEAST * scale / np.maximum(budgets, 1.0))
        raised, before = replace(part.prices, memory=memory), part.lower_bound_us
        alive = self._bounding.settle(part, raised, sweeps=_SWEEPS)
        if part.lower_bound_us > before:
            self._bound_prices = raised
        windows = len(self.problem.windows)
        if cuts:
            frugal = min(cuts, key=lambda cut: float(cut.slope[windows:].max(initial=-math.inf)))
            self.programs.see(frugal.choices)
        return alive

    def _mix(self, pairs: int) -> None:
        found = self.programs.mix(self.part, pairs=pairs, gap=0.1 * self.gap)
        if found is not None and found.objective_us < self._best_us():
            self.mixture = found
            self.incumbent.below_us = less_by(found.objective_us, self.gap)

    def _best_us(self) -> float:
        mixture_us = math.inf if self.mixture is None else self.mixture.objective_us
        return min(mixture_us, self.incumbent.objective_us)

    def beat(self, rivals: Sequence[Rival], whole: ReducedProblem) -> None:
        """Looks for what is cheaper among rivals; ``whole`` is the problem before any drops.

        Not by branching, which would go on for the best choice of which all things do the same.
        """
        self.incumbent.below_us = self._best_us()
        beat_rivals(
            self.incumbent,
            whole,
            rivals,
            prices=self.part.prices,
            settings=self.settings,
            deadline=self.deadline.at,
            most_parts=1,
        )

    def solution(self) -> MixedSolution:
        """What was found."""
        choices = self.incumbent.choices
        if choices and self.incumbent.objective_us <= self._best_us():
            self.mixture = alike_mixture(self.problem, choices)
        objective_us = math.inf if self.mixture is None else self.mixture.objective_us
        recent = [cut.choices for cut in self.incumbent.price_model.cuts[-MOST_CANDIDATES:]]
        return MixedSolution(
            mixture=self.mixture,
            lower_bound_us=min(self.lower_bound_us, objective_us),
            gap=gap_between(objective_us, self.lower_bound_us),
            seconds=time.perf_counter() - self.start,
            memory_prices=tuple(self.part.prices.memory.tolist()),
            warm_start=WarmStart(
                choices=choices,
                candidates=tuple(each for each in recent if each != choices),
                window_prices=tuple(self.part.prices.windows.tolist()),
                memory_prices=tuple(self.part.prices.memory.tolist()),
            ),
        )

    def _report(self, stage: str) -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    stage=stage,
                    incumbent_us=self._best_us(),
                    lower_bound_us=max(self.lower_bound_us, self.part.lower_bound_us),
                    num_options=self.part.reduced.num_options,
                    seconds=time.perf_counter() - self.start,
                )
            )


def _nothing(problem: Problem, start: float) -> MixedSolution:
    return MixedSolution(
        mixture=None,
        lower_bound_us=math.inf,
        gap=math.inf,
        seconds=time.perf_counter() - start,
        memory_prices=(0.0,) * len(problem.memory),
        warm_start=WarmStart(choices=()),
    )
