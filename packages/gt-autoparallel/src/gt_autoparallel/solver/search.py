"""The search: bound and choice approach each other, and what cannot matter is dropped.

1. Dual ascent (``bounding``) raises the lower bound and finds first prices.
2. In turns, the LP over promising options gives better prices and a mix of options, the MILP over
   that mix a better choice, and dual ascent with those prices the bound of all options; it drops
   options of which it is known that no choice with them beats the best one.
3. Once little is left, HiGHS solves the LP relaxation of all that is left, and if that is
   fractional the MILP. As long as too much is left, the problem is branched in two parts.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gt_autoparallel.solver.bounding import (
    Bounding,
    SearchPart,
    SearchSettings,
    with_settled_windows,
)
from gt_autoparallel.solver.deadline import Deadline
from gt_autoparallel.solver.highs_model import HighsModel
from gt_autoparallel.solver.incumbent import PRECISION, Incumbent, less_by
from gt_autoparallel.solver.message_passing import Prices
from gt_autoparallel.solver.price_model import PriceModel
from gt_autoparallel.solver.problem import BoolArray, FloatArray, Problem
from gt_autoparallel.solver.reduced_problem import ReducedProblem
from gt_autoparallel.solver.restricted_programs import RestrictedPrograms, weights_of_options
from gt_autoparallel.solver.solution import (
    MOST_CANDIDATES,
    Progress,
    ProgressCallback,
    WarmStart,
    relative_gap,
)

_SWEEPS = 12
"""Sweeps of dual ascent after each LP on the whole problem; on its parts half of that."""


@dataclass(slots=True)
class Search:
    """The state of one search, from the first bound to the last choice."""

    problem: Problem
    reduced: ReducedProblem
    gap: float
    deadline: Deadline
    progress: ProgressCallback | None
    settings: SearchSettings
    start: float
    below_us: float = math.inf
    """Choices that cost this or more are not looked for."""

    most_parts: float = math.inf
    """Parts that are looked at before the search ends; 1: nothing is branched."""

    lower_bound_us: float = -math.inf
    prices: Prices = field(init=False)
    """Duals of the first relaxation."""
    method: str = ""
    infeasible: bool = False
    """Whether it is proven that there is no choice at all."""
    seconds: dict[str, float] = field(default_factory=dict)
    num_parts: int = 0
    incumbent: Incumbent = field(init=False)
    programs: RestrictedPrograms = field(init=False)
    _bounding: Bounding = field(init=False)
    _is_warm: bool = False
    """Whether prices are those that another solve ended with."""

    _open: list[tuple[float, int, SearchPart]] = field(default_factory=list)
    _settled_bound_us: float = math.inf

    def __post_init__(self) -> None:
        self.prices = Prices(
            windows=np.ones(len(self.problem.windows)), memory=np.zeros(len(self.problem.memory))
        )
        self.incumbent = Incumbent(
            self.problem, self.gap, PriceModel(problem=self.problem), self.below_us
        )
        self.programs = RestrictedPrograms(
            self.incumbent,
            self.settings,
            self.deadline.seconds_left,
            [set() for _ in self.problem.variables],
        )
        self._bounding = Bounding(
            self.problem, self.incumbent, self.settings, self.deadline.is_over
        )

    # ------------------------------------------------------------------ state

    @property
    def relative_gap(self) -> float:
        """Gap between the best choice and the bound, relative to the choice."""
        return relative_gap(self.incumbent.objective_us, self.lower_bound_us)

    @property
    def has_nothing_below(self) -> bool:
        """Whether it is known that no choice costs less than ``below_us``."""
        found_none = self.incumbent.objective_us >= self.below_us
        return found_none and self.lower_bound_us >= less_by(self.below_us, PRECISION)

    def _report(self, stage: str, part: SearchPart) -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    stage=stage,
                    incumbent_us=self.incumbent.objective_us,
                    lower_bound_us=self._global_bound(part),
                    num_options=part.reduced.num_options,
                    seconds=time.perf_counter() - self.start,
                )
            )

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Counts the time of what runs meanwhile as that of a stage."""
        since = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - since

    def begin_at(self, warm_start: WarmStart) -> None:
        """Takes what another solve learned; what does not fit this problem is left out."""
        for choices in warm_start.fitting_choices(self.problem):
            self.incumbent.offer(choices)
            self.programs.see(choices)
        prices = warm_start.fitting_prices(self.problem)
        if prices is not None:
            self.prices = with_settled_windows(self.reduced, prices)
            self._is_warm = True

    def warm_start(self) -> WarmStart:
        """What another solve can learn from this one."""
        best = self.incumbent.choices
        recent = [cut.choices for cut in self.incumbent.price_model.cuts[-MOST_CANDIDATES:]]
        return WarmStart(
            choices=best,
            candidates=tuple(choices for choices in recent if choices != best),
            window_prices=tuple(self.prices.windows.tolist()),
            memory_prices=tuple(self.prices.memory.tolist()),
        )

    def _global_bound(self, part: SearchPart | None = None) -> float:
        """What nothing that was not looked at yet can be below."""
        bounds = [bound for bound, _, _ in self._open]
        if part is not None:
            bounds.append(part.lower_bound_us)
        return max(
            min([*bounds, self.incumbent.cutoff_us, self._settled_bound_us]), self.lower_bound_us
        )

    # ------------------------------------------------------------------ the search

    def run(self) -> None:
        """Searches until proven, or out of time."""
        if not self.reduced.nodes:
            self.incumbent.offer(())
            self.lower_bound_us, self.method = self.incumbent.objective_us, "nothing to choose"
            return
        self._push(SearchPart(self.reduced, self.prices))
        while self._open and self.num_parts < self.most_parts and not self.deadline.is_over():
            bound, _, part = heapq.heappop(self._open)
            if bound >= self.incumbent.cutoff_us:
                continue
            self.num_parts += 1
            for child in self._process(part):
                self._push(child)
            self.lower_bound_us = self._global_bound()
        self.lower_bound_us = self._global_bound()
        if not self._open and self.incumbent.objective_us == math.inf:
            self.infeasible = True

    def _push(self, part: SearchPart) -> None:
        heapq.heappush(self._open, (part.lower_bound_us, -self.num_parts - len(self._open), part))

    def _process(self, part: SearchPart) -> list[SearchPart]:
        """Settles a part, or gives what it was branched into (itself when time is over)."""
        if part.reduced.num_pairs > self.settings.small_pairs:
            self.method = "dual ascent" if part.depth == 0 else "branch and bound"
            alive = self._bound(part)
            if part.depth == 0:
                self.prices = part.prices
            self._report(f"part {self.num_parts}", part)
            if not alive or part.lower_bound_us >= self.incumbent.cutoff_us:
                return []
            if self.deadline.is_over():
                return [part]
        if part.reduced.num_pairs <= self.settings.small_pairs and self._solve_whole(part):
            return []
        if self.deadline.is_over():
            return [part]
        children = []
        for masks in branch(part.reduced, part.weights, part.prices):
            child = SearchPart(
                part.reduced.copy(),
                part.prices,
                part.lower_bound_us,
                part.depth + 1,
                list(part.weights),
            )
            if child.drop(masks):
                children.append(child)
        return children

    def _bound(self, part: SearchPart) -> bool:
        """Bound and choice of a large part; False if nothing is left below the cutoff."""
        at_root = part.depth == 0
        if at_root:
            with self.timed("ascent"):
                # Prices that are nearly right need no cutting planes: the LP corrects them.
                rounds = self.settings.rounds // (4 if self._is_warm else 1)
                alive = self._bounding.ascend(part, rounds)
            with self.timed("budgets"):
                alive = alive and self._bounding.keep_budgets(part)
            if not alive:
                return False
            if self.incumbent.choices:
                self.programs.see(self.incumbent.choices)
        # Rounding with many options at the root, then ever more rarely: after 2, 4, 8, ... parts.
        in_turn = self.num_parts & (self.num_parts - 1) == 0
        for turn in range(self.settings.relaxations // (1 if at_root else 2)):
            if part.reduced.num_pairs <= self.settings.small_pairs or self.deadline.is_over():
                return True
            with self.timed("lp"):
                result = self.programs.relax(part)
            if result is None:
                with self.timed("ascent"):
                    return self._bounding.ascend(part, self.settings.rounds // 2)
            if turn == 0 or at_root:
                with self.timed("rounding"):
                    self.programs.round(part, pairs=0)
            prices = Prices(windows=result.window_prices, memory=result.memory_prices)
            with self.timed("ascent"):
                sweeps = _SWEEPS // (1 if at_root else 2)
                if not self._bounding.settle(part, prices, sweeps=sweeps):
                    return False
            self._report("LP of promising options", part)
            room = self.incumbent.cutoff_us - part.lower_bound_us
            if result.lower_bound_us - part.lower_bound_us <= 0.02 * room:
                break
        if in_turn and part.reduced.num_pairs > self.settings.small_pairs:
            before = self.incumbent.cutoff_us
            with self.timed("rounding"):
                self.programs.round(part, pairs=self.settings.restricted_pairs)
            if self.incumbent.cutoff_us < before:
                with self.timed("ascent"):
                    return self._bounding.settle(part, part.prices, sweeps=2)
        return True

    # ------------------------------------------------------------------ HiGHS

    def _solve_whole(self, part: SearchPart) -> bool:
        """HiGHS on all of a part: LP relaxation, then MILP; whether that settles it."""
        with self.timed("budgets"):
            if part.depth and not self._bounding.keep_budgets(part):
                return True
        self.method = "LP relaxation" if part.depth == 0 else "branch and bound"
        with self.timed("lp"):
            model = HighsModel(part.reduced)
            relaxation = model.solve(integer=False, seconds=self.deadline.seconds_left())
        if relaxation.feasible is False:
            return True
        self.programs.take(part.reduced, relaxation)
        if relaxation.weights:
            part.weights = weights_of_options(part.reduced, relaxation)
        part.lower_bound_us = max(part.lower_bound_us, relaxation.lower_bound_us)
        if part.depth == 0 and relaxation.optimal:
            self.prices = Prices(windows=relaxation.window_prices, memory=relaxation.memory_prices)
        self._report("LP relaxation", part)
        if part.lower_bound_us >= self.incumbent.cutoff_us:
            return True
        if part.depth == 0:
            with self.timed("budgets"):
                if not self._bounding.keep_budgets(part):
                    return True
            model = HighsModel(part.reduced)
        self.method = "MILP" if part.depth == 0 else "branch and bound"
        with self.timed("milp"):
            result = model.solve(
                integer=True,
                seconds=self.deadline.seconds_left(),
                gap=self.gap,
                max_nodes=self.settings.whole_nodes,
            )
            kept = self.programs.take(part.reduced, result)
        if result.feasible is False:
            return True
        part.lower_bound_us = max(part.lower_bound_us, result.lower_bound_us)
        self._report("MILP", part)
        if part.lower_bound_us >= self.incumbent.cutoff_us:
            return True
        # By the tolerance of HiGHS a choice may be optimal that exceeds a budget by a byte: then
        # the part is branched until such a choice is alone.
        settled = result.optimal and (kept or part.reduced.num_options == len(part.reduced.nodes))
        if settled and kept:
            self._settled_bound_us = min(self._settled_bound_us, part.lower_bound_us)
        return settled


# How a part of the problem is branched: where demands on budgets and windows differ.
#
# With prices fixed the relaxation is nearly always whole; what is fractional is a mix of few
# choices that each take too much or too little of a budget or a window. So the node is branched
# whose mixed options differ most in that, into the options closer to either side.
def branch(
    reduced: ReducedProblem, weights: Sequence[Mapping[int, float]], prices: Prices
) -> list[list[BoolArray]]:
    """Two parts as masks of the options of each node; together they have all options.

    ``weights`` are those of options in a fractional solution, or empty. Without prices of memory, a
    row's spread weighs as much as the costs'.
    """
    node, mask = _by_demand(reduced, weights, prices) or _by_weight(reduced, weights)
    parts = []
    for side in (mask, ~mask):
        masks = [np.ones(len(n.options), dtype=bool) for n in reduced.nodes]
        masks[node] = side
        parts.append(masks)
    return parts


def _shares(
    reduced: ReducedProblem, weights: Sequence[Mapping[int, float]], index: int
) -> FloatArray:
    """[K] The weights of a node's options that are left, of sum 1 if there are any."""
    options = reduced.nodes[index].options.tolist()
    shares = np.array([weights[index].get(option, 0.0) for option in options])
    total = float(shares.sum())
    return shares / total if total > 0.0 else shares


def _by_demand(
    reduced: ReducedProblem, weights: Sequence[Mapping[int, float]], prices: Prices
) -> tuple[int, BoolArray] | None:
    """The node of which the mixed options take the most different demands."""
    most, found = 0.0, None
    scale = np.where(prices.memory > 0.0, prices.memory, _memory_scale(reduced))
    for index in range(len(weights)):
        if len(weights[index]) < 2:
            continue
        shares = _shares(reduced, weights, index)
        if (shares > 1e-6).sum() < 2:
            continue
        demands = _demands(reduced, index, scale)
        mean = shares @ demands
        spreads = shares @ np.abs(demands - mean)
        axis = int(spreads.argmax()) if len(spreads) else 0
        if len(spreads) and float(spreads[axis]) > most * (1 + 1e-9):
            mask = demands[:, axis] > mean[axis]
            if mask.any() and not mask.all():
                most, found = float(spreads[axis]), (index, mask)
    return found


def _memory_scale(reduced: ReducedProblem) -> FloatArray:
    """[memory rows] us per byte such that a row's spread weighs as much as the costs'."""
    spread = sum((node.memory.max(axis=1) - node.memory.min(axis=1)) for node in reduced.nodes)
    costs = sum(float(node.cost.max() - node.cost.min()) for node in reduced.nodes) or 1.0
    scale: FloatArray = costs / np.maximum(np.asarray(spread, dtype=np.float64), 1e-9)
    return np.where(np.asarray(spread) > 0, scale, 0.0)


def _demands(reduced: ReducedProblem, index: int, scale: FloatArray) -> FloatArray:
    """[K, windows + memory rows] What each option takes of each window and budget, in us."""
    node = reduced.nodes[index]
    windows = np.zeros((len(reduced.multiplicity), len(node.options)))
    for window, times in node.compute.items():
        windows[window] += reduced.multiplicity[window] * times
    for window, times in node.communication.items():
        windows[window] -= reduced.multiplicity[window] * times
    for position in node.links:
        link = reduced.links[position]
        assert link is not None, "a node has only links that live"
        side = link.side(index)
        for window, table in link.communication.items():
            finite = np.isfinite(link.cost)
            least = np.where(finite, table, np.inf).min(axis=1 - side)
            windows[window] -= reduced.multiplicity[window] * least[link.labels[side]]
    return np.concatenate([windows, node.memory * scale[:, None]]).T


def _by_weight(
    reduced: ReducedProblem, weights: Sequence[Mapping[int, float]]
) -> tuple[int, BoolArray]:
    """The node that is mixed most evenly: its heaviest option against all others."""
    most, found = 1e-6, None
    for index in range(len(weights)):
        if len(weights[index]) < 2 or len(reduced.nodes[index].options) < 2:
            continue
        shares = _shares(reduced, weights, index)
        rest = float(shares.sum() - shares.max())
        if rest > most:
            most = rest
            found = index, np.arange(len(shares)) == shares.argmax()
    return found or _by_size(reduced)


def _by_size(reduced: ReducedProblem) -> tuple[int, BoolArray]:
    """The node with most links, its options halved by label of its first link."""
    index = max(
        (i for i, node in enumerate(reduced.nodes) if len(node.options) > 1),
        key=lambda i: (len(reduced.nodes[i].links), len(reduced.nodes[i].options)),
    )
    node = reduced.nodes[index]
    labels = np.arange(len(node.options))
    if node.links:
        link = reduced.links[node.links[0]]
        assert link is not None, "a node has only links that live"
        labels = link.labels[link.side(index)]
    order = np.unique(labels)
    if len(order) < 2:
        labels = np.arange(len(node.options))
        order = labels
    return index, labels < order[len(order) // 2]
