"""The search: bound and choice approach each other, and what cannot matter is dropped.

1. Dual ascent (``message_passing``, ``price_model``) raises the lower bound; each sweep decodes a
   choice, feasible or not.
2. An option of which it is known that no choice with it beats the best one is dropped.
3. HiGHS solves the problem restricted to the most promising options, for a better choice.
4. Once little is left, HiGHS solves the LP relaxation of all that is left, and if that is
   fractional the MILP. As long as too much is left, the problem is branched in two parts.

Dropping by bounds is reduced-cost fixing (Dantzig, Fulkerson and Johnson 1954) with the
min-marginals of the messages as reduced costs.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gt_autoparallel.problem import FloatArray, IntArray, Problem
from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.branching import branch
from gt_autoparallel.solver.elimination import Elimination
from gt_autoparallel.solver.evaluation import evaluate
from gt_autoparallel.solver.highs_model import HighsModel, HighsResult
from gt_autoparallel.solver.message_passing import DualAscent, Prices
from gt_autoparallel.solver.price_model import Cut, PriceModel, PriceStep
from gt_autoparallel.solver.reduced_problem import ReducedProblem, bytes_as_costs
from gt_autoparallel.solver.solution import Progress, ProgressCallback, WarmStart, relative_gap

__all__ = ["Search", "SearchSettings"]

BoolArray = NDArray[np.bool_]

_MOST_CANDIDATES = 40
"""Choices that a warm start hands on, besides the best one."""

_MOVES = (0.5, 0.2, 0.05, 1.0)
"""Shares of the way to the prices of the cuts that are tried in turn, as long as none helps."""

_PRECISION = 1e-10
"""Relative difference of objectives that counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """When to do what. Tests change them to reach every stage with small problems."""

    small_pairs: int = 4_000
    """Problems, and parts of problems, with no more pairs than this go to HiGHS whole."""

    whole_nodes: int = 1_000
    """Branch-and-bound nodes of HiGHS on those, before they are branched here."""

    restricted_pairs: int = 4_000
    """About how many pairs a restricted problem has."""

    relaxed_pairs: int = 50_000
    """Up to which HiGHS solves the LP relaxation, once, for its prices."""

    restricted_nodes: int = 200
    """Branch-and-bound nodes of HiGHS on a restricted problem, at most."""

    memory_sweeps: int = 4
    """Of dual ascent on the bytes of a memory row."""

    most_entries: int = 200_000
    """Of a factor in elimination before it is split."""

    most_work: int = 5_000_000
    """Table entries up to which elimination is tried in each round of dual ascent."""

    rounds: int = 60
    """Of dual ascent on the whole problem, at most; on its parts a quarter of that."""


@dataclass(slots=True)
class _Part:
    """A part of the problem, the whole one at first."""

    reduced: ReducedProblem
    prices: Prices
    lower_bound_us: float
    depth: int
    mix: list[tuple[Cut, float]] = field(default_factory=list)


@dataclass(slots=True)
class Search:
    """One solve."""

    problem: Problem
    reduced: ReducedProblem
    gap: float
    deadline: float
    """By ``time.perf_counter``."""
    progress: ProgressCallback | None
    settings: SearchSettings
    start: float

    choices: tuple[int, ...] = ()
    objective_us: float = math.inf
    total_bytes: float = math.inf
    lower_bound_us: float = -math.inf
    prices: Prices = field(init=False)
    """Duals of the first relaxation."""
    method: str = ""
    infeasible: bool = False
    """Whether it is proven that there is no choice at all."""
    seconds: dict[str, float] = field(default_factory=dict)
    num_variables: int = 0
    num_rows: int = 0
    num_parts: int = 0
    _seen: list[set[int]] = field(default_factory=list)
    _price_model: PriceModel = field(init=False)
    _open: list[tuple[float, int, _Part]] = field(default_factory=list)
    _settled_bound_us: float = math.inf

    def __post_init__(self) -> None:
        self.prices = Prices(
            windows=np.ones(len(self.problem.windows)), memory=np.zeros(len(self.problem.memory))
        )
        self._seen = [set() for _ in self.problem.variables]
        self._price_model = PriceModel(problem=self.problem)

    # ------------------------------------------------------------------ state

    @property
    def _cutoff(self) -> float:
        """Choices that cost this or more are not worth looking for."""
        if not math.isfinite(self.objective_us):
            return math.inf
        return self.objective_us - max(self.gap, _PRECISION) * abs(self.objective_us)

    @property
    def _time_left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def relative_gap(self) -> float:
        """Of the best choice and the bound."""
        return relative_gap(self.objective_us, self.lower_bound_us)

    def _report(self, stage: str, part: _Part) -> None:
        if self.progress is not None:
            self.progress(
                Progress(
                    stage=stage,
                    incumbent_us=self.objective_us,
                    lower_bound_us=self._global_bound(part),
                    num_options=part.reduced.num_options,
                    seconds=time.perf_counter() - self.start,
                )
            )

    def _spent(self, stage: str, since: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - since

    def offer(self, choices: tuple[int, ...]) -> bool:
        """Takes ``choices`` as the best if they keep the budgets and cost less than the best yet.

        Among equal costs fewer bytes are better.
        """
        found = evaluate(self.problem, choices)
        if found.objective_us == math.inf:
            return False
        self._price_model.add(choices, found)
        if any(found.excess_bytes(self.problem)):
            return False
        room = _PRECISION * 1e-2 * abs(found.objective_us)
        total_bytes = math.fsum(found.memory_bytes)
        if found.objective_us >= self.objective_us - room and not (
            found.objective_us <= self.objective_us + room and total_bytes < self.total_bytes
        ):
            return False
        self.choices, self.objective_us = choices, found.objective_us
        self.total_bytes = total_bytes
        return True

    def begin_at(self, warm_start: WarmStart) -> None:
        """Takes what another solve learned; what does not fit this problem is left out."""
        variables = self.problem.variables
        for choices in (warm_start.choices, *warm_start.candidates):
            if len(choices) != len(variables) or not all(
                0 <= choice < len(variable.cost_us)
                for choice, variable in zip(choices, variables, strict=True)
            ):
                continue
            self.offer(choices)
            for seen, choice in zip(self._seen, choices, strict=True):
                seen.add(choice)
        windows, memory = warm_start.window_prices, warm_start.memory_prices
        if (len(windows), len(memory)) == (len(self.problem.windows), len(self.problem.memory)):
            prices = Prices(windows=np.array(windows), memory=np.array(memory))
            self.prices = self._with_settled_windows(self.reduced, prices)

    def warm_start(self) -> WarmStart:
        """What another solve can learn from this one."""
        recent = [cut.choices for cut in self._price_model.cuts[-_MOST_CANDIDATES:]]
        return WarmStart(
            choices=self.choices,
            candidates=tuple(choices for choices in recent if choices != self.choices),
            window_prices=tuple(self.prices.windows.tolist()),
            memory_prices=tuple(self.prices.memory.tolist()),
        )

    def _global_bound(self, part: _Part | None = None) -> float:
        """What nothing that was not looked at yet can be below."""
        bounds = [bound for bound, _, _ in self._open]
        if part is not None:
            bounds.append(part.lower_bound_us)
        return max(min([*bounds, self._cutoff, self._settled_bound_us]), self.lower_bound_us)

    # ------------------------------------------------------------------ the search

    def run(self) -> None:
        """Searches until proven, or out of time."""
        if not self.reduced.nodes:
            self.offer(())
            self.lower_bound_us, self.method = self.objective_us, "nothing to choose"
            return
        part = _Part(self.reduced, self.prices, -math.inf, 0)
        self._push(part)
        while self._open and self._time_left > 0.0:
            bound, _, part = heapq.heappop(self._open)
            if bound >= self._cutoff:
                continue
            self.num_parts += 1
            for child in self._process(part):
                self._push(child)
            self.lower_bound_us = self._global_bound()
        self.lower_bound_us = self._global_bound()
        if not self._open and self.objective_us == math.inf:
            self.infeasible = True

    def _push(self, part: _Part) -> None:
        heapq.heappush(self._open, (part.lower_bound_us, -self.num_parts - len(self._open), part))

    def _process(self, part: _Part) -> list[_Part]:
        """Settles a part, or gives what it was branched into (itself when time is over)."""
        # At the root after its first bound: there prices say more while all options are left.
        if part.depth and not self._keep_budgets(part):
            return []
        if part.reduced.num_pairs > self.settings.small_pairs:
            rounds = self.settings.rounds // (1 if part.depth == 0 else 4)
            alive = self._ascend(part, rounds)
            self.method = "dual ascent"
            if part.depth == 0:
                self.prices = part.prices
                alive = alive and self._keep_budgets(part)
            # At the root, then ever more rarely: after 2, 4, 8, ... parts.
            turn = self.num_parts & (self.num_parts - 1) == 0
            for attempt in range(1, 5 if part.depth == 0 else 2):
                if not (alive and turn) or part.reduced.num_pairs <= self.settings.small_pairs:
                    break
                room, num_options = self._cutoff - part.lower_bound_us, part.reduced.num_options
                self._solve_restricted(part, attempt * self.settings.restricted_pairs)
                if part.depth == 0 and part.reduced.num_pairs <= self.settings.relaxed_pairs:
                    self._relax(part)
                if part.lower_bound_us < self._cutoff:
                    alive = self._ascend(part, rounds // 2)
                closer = self._cutoff - part.lower_bound_us < 0.9 * room
                if not closer and part.reduced.num_options > 0.9 * num_options:
                    break
            self._report(f"part {self.num_parts}", part)
            if not alive or part.lower_bound_us >= self._cutoff:
                return []
            if self._time_left <= 0.0:
                return [part]
        if part.reduced.num_pairs <= self.settings.small_pairs and self._solve_whole(part):
            return []
        if self._time_left <= 0.0:
            return [part]
        children = []
        mix = [(cut.choices, weight) for cut, weight in part.mix]
        for masks in branch(part.reduced, self.problem, mix, self.choices):
            child = _Part(part.reduced.copy(), part.prices, part.lower_bound_us, part.depth + 1)
            if self._drop(child, masks):
                children.append(child)
        return children

    def _keep_budgets(self, part: _Part) -> bool:
        """Drops options with which no budget can be kept; False if then nothing is left.

        By dual ascent with the bytes of one row as costs. Its choices are offered: close to the
        least budget they may be the only ones that keep it.
        """
        since = time.perf_counter()
        for row in range(len(self.problem.memory)):
            reduced = part.reduced
            budget = float(reduced.budget_bytes[row])
            if math.fsum(float(node.memory[row].max()) for node in reduced.nodes) <= budget:
                continue
            ascent = DualAscent(bytes_as_costs(reduced, row), part.prices)
            for sweep in range(self.settings.memory_sweeps):
                positions = ascent.sweep(forward=sweep % 2 == 0)
                if part.depth == 0:
                    self._decoded(part, positions)
            room = 1e-9 * max(abs(budget), 1.0)
            masks = [bound <= budget + room for bound in ascent.option_bounds()]
            if not all(mask.all() for mask in masks) and not self._drop(part, masks):
                return False
        self._spent("budgets", since)
        return True

    def _ascend(self, part: _Part, rounds: int) -> bool:
        """Dual ascent, dropping options as the bounds allow; False if nothing is left."""
        since = time.perf_counter()
        alive = self._ascend_inner(part, rounds)
        self._spent("ascent", since)
        return alive

    def _ascend_inner(self, part: _Part, rounds: int) -> bool:
        ascent = DualAscent(part.reduced, part.prices)
        elimination = self._elimination(part.reduced)
        best, best_prices, allowed, last = -math.inf, part.prices, math.inf, -math.inf
        attempt, stalled = 0, 0
        for turn in range(rounds):
            for forward in (True, False):
                self._decoded(part, ascent.sweep(forward=forward))
            bound = ascent.swept_bound
            if elimination is not None and turn >= 2:
                exact = elimination.minimum(*ascent.potentials())
                self._decoded(part, exact.positions)
                bound = max(bound, exact.bound_us)
            highest = max(best, bound)
            target = self._cutoff if self._cutoff < math.inf else highest + 0.05 * abs(highest)
            room = max(target - highest, 0.0)
            progressed = bound - best > 0.01 * room
            if bound > best:
                best, best_prices = bound, ascent.prices
            part.lower_bound_us = max(part.lower_bound_us, bound)
            if part.lower_bound_us >= self._cutoff:
                return False
            masks = self._below_cutoff(ascent.option_bounds())
            if sum(int(mask.sum()) for mask in masks) < 0.95 * part.reduced.num_options:
                prices = ascent.prices
                if not self._drop(part, masks):
                    return False
                ascent = DualAscent(part.reduced, prices)
                elimination = self._elimination(part.reduced)
                last, stalled = -math.inf, 0
                continue
            if self._time_left <= 0.0:
                break
            if bound - last > 0.02 * room:
                # The messages have not settled yet: more sweeps at the same prices.
                last = bound
                continue
            attempt += not progressed
            step = self._next_prices(part, best_prices, _MOVES[attempt % len(_MOVES)])
            if step is None:
                break
            progressed |= allowed - step.bound_us > 0.02 * (allowed - best)
            allowed, last = step.bound_us, -math.inf
            ascent.set_prices(step.prices)
            stalled = 0 if progressed else stalled + 1
            if stalled > 5 or allowed - best < 1e-3 * room:
                break
        part.prices = self._with_settled_windows(part.reduced, best_prices)
        return True

    def _elimination(self, reduced: ReducedProblem) -> Elimination | None:
        """If the problem is narrow enough for it to be quick."""
        elimination = Elimination(reduced, most_entries=self.settings.most_entries)
        return elimination if elimination.work <= self.settings.most_work else None

    def _next_prices(self, part: _Part, best: Prices, move: float) -> PriceStep | None:
        """The prices to try next, if there are any prices and cuts.

        Args:
            part: of which the cuts are taken.
            best: the prices of the best bound yet.
            move: share of the way from there to the prices where the cuts allow most.
        """
        cuts = self._cuts_of(part)
        if not cuts or not self._price_model.is_needed:
            return None
        windows, rows = len(self.problem.windows), len(self.problem.memory)
        scale = max(abs(part.lower_bound_us), abs(cuts[0].constant), 1e-6)
        lower, upper = np.zeros(windows + rows), np.ones(windows + rows)
        for window, share in part.reduced.linear_windows.items():
            lower[window] = upper[window] = share
        excess = np.stack([cut.slope[windows:] for cut in cuts])
        spread = np.maximum(np.ptp(excess, axis=0), 0.01 * np.abs(excess).max(initial=1.0))
        upper[windows:] = np.maximum(4.0 * best.memory, 0.2 * scale / spread)
        step = self._price_model.step(cuts, lower=lower, upper=upper, scale_us=scale)
        if step is None:
            return None
        part.mix = [(cut, w) for cut, w in zip(cuts, step.weights, strict=True) if w > 1e-6]
        prices = Prices(
            windows=(1 - move) * best.windows + move * step.prices.windows,
            memory=(1 - move) * best.memory + move * step.prices.memory,
        )
        return replace(step, prices=prices)

    def _cuts_of(self, part: _Part) -> list[Cut]:
        """The cuts of choices that are still in a part."""
        if part.depth == 0:
            return self._price_model.cuts
        allowed = [set(node.options.tolist()) for node in part.reduced.nodes]
        return [
            cut
            for cut in self._price_model.cuts
            if all(choice in options for choice, options in zip(cut.choices, allowed, strict=True))
        ]

    def _below_cutoff(self, bounds: Sequence[FloatArray]) -> list[BoolArray]:
        cutoff = self._cutoff
        return [bound < cutoff for bound in bounds]

    def _drop(self, part: _Part, masks: Sequence[BoolArray]) -> bool:
        """Drops options where masks are False; False if then nothing is left to look for."""
        changed = []
        for index, mask in enumerate(masks):
            if not mask.all():
                part.reduced.keep(index, mask)
                changed.append(index)
        if make_arc_consistent(part.reduced, changed) is not None:
            return False
        part.reduced.compact_links()
        part.reduced.settle_windows()
        part.prices = self._with_settled_windows(part.reduced, part.prices)
        return True

    @staticmethod
    def _with_settled_windows(reduced: ReducedProblem, prices: Prices) -> Prices:
        """The prices, with the shares of windows that became linear."""
        windows = prices.windows.copy()
        for window, share in reduced.linear_windows.items():
            windows[window] = share
        return replace(prices, windows=windows)

    def _decoded(self, part: _Part, positions: IntArray) -> None:
        for node, seen, position in zip(part.reduced.nodes, self._seen, positions, strict=True):
            seen.add(int(node.options[position]))
        self.offer(part.reduced.choices(positions))

    # ------------------------------------------------------------------ HiGHS

    def _solve_restricted(self, part: _Part, pairs: int) -> None:
        """HiGHS on the most promising options, about ``pairs`` pairs, for a better choice."""
        since = time.perf_counter()
        ascent = DualAscent(part.reduced, part.prices)
        for forward in (True, False, True):
            ascent.sweep(forward=forward)
        spread = [values - values.min() for values in ascent.option_bounds()]
        rest = self._restricted_to(part, self._promising(part, spread, pairs))
        if rest is not None:
            model = HighsModel(rest)
            self._count(model)
            result = model.solve(
                integer=True,
                seconds=self._time_left,
                gap=max(self.gap, 1e-4),
                max_nodes=self.settings.restricted_nodes,
            )
            self._take(rest, result)
        self._spent("restricted", since)
        self._report("restricted problem", part)

    def _relax(self, part: _Part) -> None:
        """The LP relaxation by HiGHS: its duals are the best prices, and messages for them."""
        since = time.perf_counter()
        model = HighsModel(part.reduced)
        self._count(model)
        result = model.solve(integer=False, seconds=self._time_left)
        self._take(part.reduced, result)
        if result.messages:
            for link, messages in zip(part.reduced.links, result.messages, strict=True):
                if link is not None and messages is not None:
                    link.messages = [message.copy() for message in messages]
            part.prices = Prices(windows=result.window_prices, memory=result.memory_prices)
            part.lower_bound_us = max(part.lower_bound_us, result.lower_bound_us)
            self.prices = part.prices
        self._spent("lp", since)
        self._report("LP relaxation", part)

    def _promising(self, part: _Part, spread: list[FloatArray], pairs: int) -> list[BoolArray]:
        """Options whose bound is close to the least, such that about so many pairs are left."""
        levels = np.quantile(np.concatenate(spread), [0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
        chosen: list[BoolArray] = []
        for level in levels:
            masks = [
                (values <= max(level, values.min())) | np.isin(node.options, list(seen))
                for node, seen, values in zip(part.reduced.nodes, self._seen, spread, strict=True)
            ]
            size = 0
            for _, link in part.reduced.live_links():
                sides = [
                    len(np.unique(labels[masks[end]]))
                    for end, labels in zip(link.ends, link.labels, strict=True)
                ]
                size += sides[0] * sides[1]
            if chosen and size > pairs:
                break
            chosen = masks
        return chosen

    def _restricted_to(self, part: _Part, masks: list[BoolArray]) -> ReducedProblem | None:
        rest = _Part(part.reduced.copy(), part.prices, -math.inf, 0)
        return rest.reduced if self._drop(rest, masks) else None

    def _count(self, model: HighsModel) -> None:
        if model.num_columns > self.num_variables:
            self.num_variables, self.num_rows = model.num_columns, model.num_rows

    def _take(self, reduced: ReducedProblem, result: HighsResult) -> bool:
        """Offers what HiGHS found; whether any of it keeps the budgets."""
        kept = False
        for positions in result.positions:
            choices = reduced.choices(positions)
            self.offer(choices)
            kept |= not any(evaluate(self.problem, choices).excess_bytes(self.problem))
            for node, seen, position in zip(reduced.nodes, self._seen, positions, strict=True):
                seen.add(int(node.options[position]))
        return kept

    def _solve_whole(self, part: _Part) -> bool:
        """HiGHS on all of a part: LP relaxation, then MILP; whether that settles it."""
        since = time.perf_counter()
        model = HighsModel(part.reduced)
        self._count(model)
        relaxation = model.solve(integer=False, seconds=self._time_left)
        self.method = "LP relaxation" if part.depth == 0 else "branch and bound"
        self._spent("lp", since)
        if relaxation.feasible is False:
            return True
        self._take(part.reduced, relaxation)
        part.lower_bound_us = max(part.lower_bound_us, relaxation.lower_bound_us)
        if part.depth == 0 and relaxation.optimal:
            self.prices = Prices(windows=relaxation.window_prices, memory=relaxation.memory_prices)
        self._report("LP relaxation", part)
        if part.lower_bound_us >= self._cutoff:
            return True
        if part.depth == 0:
            if not self._keep_budgets(part):
                return True
            model = HighsModel(part.reduced)
        since = time.perf_counter()
        self.method = "MILP" if part.depth == 0 else "branch and bound"
        result = model.solve(
            integer=True,
            seconds=self._time_left,
            gap=self.gap,
            max_nodes=self.settings.whole_nodes,
        )
        kept = self._take(part.reduced, result)
        self._spent("milp", since)
        if result.feasible is False:
            return True
        part.lower_bound_us = max(part.lower_bound_us, result.lower_bound_us)
        self._report("MILP", part)
        if part.lower_bound_us >= self._cutoff:
            return True
        # By the tolerance of HiGHS a choice may be optimal that exceeds a budget by a byte: then
        # the part is branched until such a choice is alone.
        settled = result.optimal and (kept or part.reduced.num_options == len(part.reduced.nodes))
        if settled and kept:
            self._settled_bound_us = min(self._settled_bound_us, part.lower_bound_us)
        return settled
