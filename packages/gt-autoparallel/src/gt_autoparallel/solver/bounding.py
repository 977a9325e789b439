"""Raises the lower bound of a part of the problem, and drops what cannot beat the best choice.

Dual ascent (``message_passing``) raises the bound at fixed prices, cutting planes (``price_model``)
or an LP (``restricted_programs``) give the prices. An option whose bound reaches the best choice is
in no better one and is dropped: reduced-cost fixing (Dantzig, Fulkerson and Johnson 1954) with the
min-marginals of the messages as reduced costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gt_autoparallel.solver.arc_consistency import make_arc_consistent
from gt_autoparallel.solver.incumbent import Incumbent
from gt_autoparallel.solver.message_passing import DualAscent, Prices
from gt_autoparallel.solver.price_model import Cut, PriceStep
from gt_autoparallel.solver.problem import BoolArray, FloatArray, IntArray, Problem
from gt_autoparallel.solver.reduced_problem import ReducedProblem, bytes_as_costs

_MOVES = (0.5, 0.2, 0.05, 1.0)
"""Shares of the way to the prices of the cuts that are tried in turn, as long as none helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """When to do what. Tests change them to reach every stage with small problems."""

    small_pairs: int = 6_000
    """Problems, and parts of problems, with no more pairs than this go to HiGHS whole."""

    whole_nodes: int = 1_000
    """Branch-and-bound nodes of HiGHS on those, before they are branched here."""

    restricted_pairs: int = 4_000
    """About how many pairs a restricted MILP has."""

    restricted_nodes: int = 200
    """Branch-and-bound nodes of HiGHS on a restricted MILP, at most."""

    mixture_pairs: tuple[int, ...] = (0, 1_000)
    """About how many pairs are mixed, in turn until a mixture is good enough; 0: the LP's own."""

    mixture_nodes: int = 200
    """Branch-and-bound nodes of HiGHS on a mixture, at most."""

    relaxed_pairs: int = 12_000
    """About how many pairs the LP over promising options has."""

    relaxations: int = 8
    """Turns of LP and dual ascent on the whole problem, at most; on its parts half of that."""

    memory_sweeps: int = 4
    """Sweeps of dual ascent on the bytes of a memory row."""

    memory_rows: int = 2
    """Rows by whose bytes options are dropped: the first ones. More are rows of alike limits, that
    would drop the same."""

    most_entries: int = 200_000
    """Entries that a factor may have in elimination before it is split."""

    most_work: int = 5_000_000
    """Table entries up to which elimination is tried."""

    rounds: int = 16
    """Rounds of dual ascent before the first LP, at most; on parts of the problem half as many."""

    most_tied_pairs: int = 30_000
    """Pairs of options of equal cost up to which fewer bytes are looked for."""


@dataclass(slots=True)
class SearchPart:
    """A part of the problem, the whole one at first."""

    reduced: ReducedProblem
    prices: Prices
    lower_bound_us: float = -math.inf
    depth: int = 0
    weights: list[dict[int, float]] = field(default_factory=list)
    """For each node: option -> its weight in a fractional solution of a relaxation."""

    def drop(self, masks: Sequence[BoolArray]) -> bool:
        """Drops options where masks are False; False if then nothing is left to look for."""
        changed = []
        for index, mask in enumerate(masks):
            if not mask.all():
                self.reduced.keep(index, mask)
                changed.append(index)
        if make_arc_consistent(self.reduced, changed) is not None:
            return False
        self.reduced.compact_links()
        self.reduced.settle_windows()
        self.prices = with_settled_windows(self.reduced, self.prices)
        return True

    def option_bounds(self) -> list[FloatArray]:
        """For each node [K]: bounds of its options at the part's prices, messages settled."""
        ascent = DualAscent(self.reduced, self.prices)
        for forward in (True, False, True):
            ascent.sweep(forward=forward)
        return ascent.option_bounds()

    def restricted(self, masks: Sequence[BoolArray]) -> ReducedProblem | None:
        """The problem with the options of ``masks`` only; None if no combination of them is."""
        rest = SearchPart(self.reduced.copy(), self.prices)
        return rest.reduced if rest.drop(masks) else None


def with_settled_windows(reduced: ReducedProblem, prices: Prices) -> Prices:
    """The prices, with the shares of windows that became linear."""
    windows = prices.windows.copy()
    for window, share in reduced.linear_windows.items():
        windows[window] = share
    return replace(prices, windows=windows)


@dataclass(slots=True)
class Bounding:
    """Bounds for the parts of one problem."""

    problem: Problem
    incumbent: Incumbent
    settings: SearchSettings
    is_late: Callable[[], bool]
    """Whether the time is over."""

    def ascend(self, part: SearchPart, rounds: int) -> bool:
        """Dual ascent with cutting-plane prices; False if nothing is left below the cutoff."""
        ascent = DualAscent(part.reduced, part.prices)
        elimination = self._elimination(part.reduced)
        best, best_prices, allowed, last = -math.inf, part.prices, math.inf, -math.inf
        attempt, stalled = 0, 0
        for turn in range(rounds):
            for forward in (True, False):
                self._offer(part, ascent.decoding_sweep(forward=forward))
            bound = ascent.swept_bound
            if elimination is not None and turn >= 2:
                exact = elimination.minimum(*ascent.potentials())
                self._offer(part, exact.positions)
                bound = max(bound, exact.bound_us)
            room = self._room(max(best, bound))
            progressed = bound - best > 0.01 * room
            if bound > best:
                best, best_prices = bound, ascent.prices
            part.lower_bound_us = max(part.lower_bound_us, bound)
            if part.lower_bound_us >= self.incumbent.cutoff_us:
                return False
            masks = self._below_cutoff(part, ascent)
            if sum(int(mask.sum()) for mask in masks) < 0.95 * part.reduced.num_options:
                prices = ascent.prices
                if not part.drop(masks):
                    return False
                ascent = DualAscent(part.reduced, with_settled_windows(part.reduced, prices))
                elimination = self._elimination(part.reduced)
                last, stalled = -math.inf, 0
                continue
            if self.is_late():
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
        part.prices = with_settled_windows(part.reduced, best_prices)
        return True

    def settle(self, part: SearchPart, prices: Prices, *, sweeps: int) -> bool:
        """Dual ascent at given prices, until it stalls; False if nothing is left to look for."""
        part.prices = with_settled_windows(part.reduced, prices)
        ascent = DualAscent(part.reduced, part.prices)
        last = -math.inf
        for _ in range(sweeps):
            ascent.sweep(forward=True)
            self._offer(part, ascent.decoding_sweep(forward=False))
            bound = ascent.swept_bound
            part.lower_bound_us = max(part.lower_bound_us, bound)
            if part.lower_bound_us >= self.incumbent.cutoff_us:
                return False
            if bound - last <= 0.005 * self._room(bound) or self.is_late():
                break
            last = bound
        elimination = self._elimination(part.reduced)
        if elimination is not None:
            exact = elimination.minimum(*ascent.potentials())
            self._offer(part, exact.positions)
            part.lower_bound_us = max(part.lower_bound_us, exact.bound_us)
            if part.lower_bound_us >= self.incumbent.cutoff_us:
                return False
        masks = self._below_cutoff(part, ascent)
        if sum(int(mask.sum()) for mask in masks) < 0.98 * part.reduced.num_options:
            return part.drop(masks)
        return True

    def keep_budgets(self, part: SearchPart) -> bool:
        """Drops options with which no budget can be kept; False if then nothing is left.

        By dual ascent with the bytes of one row as costs. Its choices are offered: close to the
        least budget they may be the only ones that keep it.
        """
        for row in range(min(len(self.problem.memory), self.settings.memory_rows)):
            reduced = part.reduced
            budget = float(reduced.budget_bytes[row])
            if math.fsum(float(node.memory[row].max()) for node in reduced.nodes) <= budget:
                continue
            ascent = DualAscent(bytes_as_costs(reduced, row), part.prices)
            for sweep in range(self.settings.memory_sweeps):
                forward = sweep % 2 == 0
                if part.depth == 0:
                    self._offer(part, ascent.decoding_sweep(forward=forward))
                else:
                    ascent.sweep(forward=forward)
            room = 1e-9 * max(abs(budget), 1.0)
            masks = [
                node.bounds_of_one(bound) <= budget + room
                for node, bound in zip(reduced.nodes, ascent.option_bounds(), strict=True)
            ]
            if not all(mask.all() for mask in masks) and not part.drop(masks):
                return False
        return True

    def _room(self, bound: float) -> float:
        """How much the bound of a part has to rise; an estimate without any choice yet."""
        cutoff = self.incumbent.cutoff_us
        return max((cutoff if cutoff < math.inf else bound + 0.05 * abs(bound)) - bound, 0.0)

    def _offer(self, part: SearchPart, positions: IntArray) -> None:
        self.incumbent.offer(part.reduced.choices(positions))

    def _below_cutoff(self, part: SearchPart, ascent: DualAscent) -> list[BoolArray]:
        cutoff = self.incumbent.cutoff_us
        return [
            node.bounds_of_one(bound) < cutoff
            for node, bound in zip(part.reduced.nodes, ascent.option_bounds(), strict=True)
        ]

    def _elimination(self, reduced: ReducedProblem) -> Elimination | None:
        """If the problem is narrow enough for it to be quick."""
        if 100 * reduced.num_pairs > self.settings.most_work:
            return None
        elimination = Elimination(reduced, most_entries=self.settings.most_entries)
        return elimination if elimination.work <= self.settings.most_work else None

    def _next_prices(self, part: SearchPart, best: Prices, move: float) -> PriceStep | None:
        """The prices to try next, if any: ``move`` of the way from ``best`` to where cuts point."""
        model = self.incumbent.price_model
        cuts = self._cuts_of(part)
        if not cuts or not model.is_needed:
            return None
        windows, rows = len(self.problem.windows), len(self.problem.memory)
        scale = max(abs(part.lower_bound_us), abs(cuts[0].constant), 1e-6)
        lower, upper = np.zeros(windows + rows), np.ones(windows + rows)
        for window, share in part.reduced.linear_windows.items():
            lower[window] = upper[window] = share
        excess = np.stack([cut.slope[windows:] for cut in cuts])
        spread = np.maximum(np.ptp(excess, axis=0), 0.01 * np.abs(excess).max(initial=1.0))
        upper[windows:] = np.maximum(4.0 * best.memory, 0.2 * scale / spread)
        step = model.step(cuts, lower=lower, upper=upper, scale_us=scale)
        if step is None:
            return None
        part.weights = [{} for _ in part.reduced.nodes]
        for cut, weight in zip(cuts, step.weights, strict=True):
            if weight > 1e-6:
                for weights, choice in zip(part.weights, cut.choices, strict=True):
                    weights[choice] = weights.get(choice, 0.0) + weight
        prices = Prices(
            windows=(1 - move) * best.windows + move * step.prices.windows,
            memory=(1 - move) * best.memory + move * step.prices.memory,
        )
        return replace(step, prices=prices)

    def _cuts_of(self, part: SearchPart) -> list[Cut]:
        """The cuts of choices that are still in a part."""
        cuts = self.incumbent.price_model.cuts
        if part.depth == 0:
            return cuts
        allowed = [set(node.options.tolist()) for node in part.reduced.nodes]
        return [
            cut
            for cut in cuts
            if all(choice in options for choice, options in zip(cut.choices, allowed, strict=True))
        ]


# A lower bound, at fixed prices, that knows cycles: nodes are eliminated one after another.
#
# Eliminating a node replaces all factors in which it takes part by one factor over its
# neighbors:
#
#     f(labels of neighbors) =
#         min_k (cost[k] + sum of the node's factors, each at the label of the option)
#
# After the last node a number is left, the exact minimum (Bertele and Brioschi 1972, "Nonserial
# Dynamic Programming"). Neighbors enter by the labels that matter, not by their options, which
# keeps factors small; graphs of models are nearly chains, so that few neighbors are alive at
# once. A factor that would still be too large is split: each part gets an own copy of the node,
# and the result is a lower bound (mini-buckets, Dechter and Rish 2003). Messages of the dual
# ascent make that bound at least as good as theirs.
@dataclass(frozen=True, slots=True, kw_only=True)
class Eliminated:
    """What elimination gives."""

    bound_us: float
    """No choice costs less at these prices; exact if no factor was split."""

    positions: IntArray
    """[nodes] A choice: the minimum if no factor was split."""


@dataclass(slots=True)
class _Factor:
    """A table over the labels of some nodes."""

    labels: dict[int, IntArray]
    """Node -> [K] label of each option. In the order of the table's dims."""

    table: FloatArray | None = None


@dataclass(slots=True)
class _Step:
    """The elimination of one node from one group of its factors."""

    node: int
    factors: list[int]
    result: int
    with_cost: bool


class Elimination:
    """The plan for one problem: an order of the nodes, and the factors on the way.

    Attributes:
        work: table entries that one evaluation computes.
        split_nodes: nodes of which factors were split; none means that the bound is exact.
    """

    def __init__(self, reduced: ReducedProblem, *, most_entries: int) -> None:
        self._reduced = reduced
        self._sizes = [len(node.options) for node in reduced.nodes]
        self._links = [index for index, _ in reduced.live_links()]
        self._factors: list[_Factor] = []
        for _, link in reduced.live_links():
            labels = dict(zip(link.ends, link.labels, strict=True))
            self._factors.append(_Factor(labels=labels))
        self._steps: list[_Step] = []
        self.work = 0
        self.split_nodes: list[int] = []
        self._plan(most_entries)

    def _plan(self, most_entries: int) -> None:
        of_node: list[set[int]] = [set() for _ in self._sizes]
        for index, factor in enumerate(self._factors):
            for node in factor.labels:
                of_node[node].add(index)
        alive = set(range(len(self._sizes)))
        weights = {node: self._weight(node, of_node[node]) for node in alive}
        while alive:
            node = min(alive, key=lambda index: (weights[index], index))
            alive.discard(node)
            groups = self._groups(node, sorted(of_node[node]), most_entries)
            if len(groups) > 1:
                self.split_nodes.append(node)
            changed: set[int] = set()
            for index in of_node[node]:
                changed.update(self._factors[index].labels)
                for other in self._factors[index].labels:
                    if other != node:
                        of_node[other].discard(index)
            for position, group in enumerate(groups):
                scope = self._scope(node, group)
                self.work += self._sizes[node] * _entries(scope)
                result = len(self._factors)
                self._factors.append(_Factor(labels=scope))
                self._steps.append(
                    _Step(node=node, factors=group, result=result, with_cost=position == 0)
                )
                for other in scope:
                    of_node[other].add(result)
            for other in changed & alive:
                weights[other] = self._weight(other, of_node[other])

    def _weight(self, node: int, factors: set[int]) -> int:
        return self._sizes[node] * _entries(self._scope(node, sorted(factors)))

    def _scope(self, node: int, factors: list[int]) -> dict[int, IntArray]:
        """The other nodes of some factors, with labels that tell all that the factors tell."""
        scope: dict[int, IntArray] = {}
        for index in factors:
            for other, labels in self._factors[index].labels.items():
                if other == node:
                    continue
                if other in scope:
                    pairs = scope[other] * (int(labels.max()) + 1) + labels
                    labels = np.unique(pairs, return_inverse=True)[1]
                scope[other] = labels
        return scope

    def _groups(self, node: int, factors: list[int], most_entries: int) -> list[list[int]]:
        """The factors of a node, in as few groups as fit (first fit, largest first)."""
        sizes = {i: _entries(self._scope(node, [i])) for i in factors}
        groups: list[list[int]] = []
        for index in sorted(factors, key=lambda i: (-sizes[i], i)):
            for group in groups:
                if _entries(self._scope(node, [*group, index])) <= most_entries:
                    group.append(index)
                    break
            else:
                groups.append([index])
        return groups or [[]]

    def minimum(
        self, constant: float, costs: list[FloatArray], tables: dict[int, FloatArray]
    ) -> Eliminated:
        """Eliminates all nodes, given ``DualAscent.potentials``."""
        for factor, link in zip(self._factors, self._links, strict=False):
            factor.table = tables[link]
        terms = [constant]
        for step in self._steps:
            result = self._factors[step.result]
            result.table = self._eliminate(step, result, costs[step.node])
            if not result.labels:
                terms.append(float(result.table))
        return Eliminated(bound_us=math.fsum(terms), positions=self._decode(costs))

    def _eliminate(self, step: _Step, result: _Factor, cost: FloatArray) -> FloatArray:
        """[labels of each node of the result] The minimum over the options of the step's node."""
        size = self._sizes[step.node]
        places = {other: 1 + dim for dim, other in enumerate(result.labels)}
        counts = [int(labels.max()) + 1 for labels in result.labels.values()]
        examples = {
            other: np.unique(labels, return_index=True)[1]
            for other, labels in result.labels.items()
        }
        unary = cost if step.with_cost else np.zeros(size)
        terms = [unary.reshape([size] + [1] * len(counts))]
        for index in step.factors:
            factor = self._factors[index]
            assert factor.table is not None, "factors are made before they are used"
            grid = np.ix_(
                *(
                    labels if other == step.node else labels[examples[other]]
                    for other, labels in factor.labels.items()
                )
            )
            dims = [0 if other == step.node else places[other] for other in factor.labels]
            table = np.transpose(factor.table[grid], np.argsort(dims))
            shape = [1] * (1 + len(counts))
            for dim, length in zip(sorted(dims), table.shape, strict=True):
                shape[dim] = length
            terms.append(table.reshape(shape))
        terms.sort(key=lambda term: term.size)
        while len(terms) > 2:
            terms = sorted([terms[0] + terms[1], *terms[2:]], key=lambda term: term.size)
        if len(terms) == 1 or size * math.prod(counts) <= 1_000_000:
            return np.asarray(sum(terms[1:], terms[0]).min(axis=0))
        # All options at once would not fit into the cache, or the memory.
        least = np.full(counts, np.inf)
        for left, right in zip(
            *(np.broadcast_to(t, (size, *t.shape[1:])) for t in terms), strict=True
        ):
            np.minimum(least, left + right, out=least)
        return least

    def _decode(self, costs: list[FloatArray]) -> IntArray:
        positions = np.full(len(self._sizes), -1, dtype=np.int64)
        factors_of: dict[int, list[int]] = {}
        for step in self._steps:
            factors_of.setdefault(step.node, []).extend(step.factors)
        for node in reversed(list(factors_of)):
            values = costs[node].copy()
            for index in factors_of[node]:
                factor = self._factors[index]
                assert factor.table is not None, "factors are made before they are used"
                values += factor.table[
                    tuple(
                        labels if other == node else int(labels[positions[other]])
                        for other, labels in factor.labels.items()
                    )
                ]
            positions[node] = int(values.argmin())
        return positions


def _entries(scope: dict[int, IntArray]) -> int:
    return math.prod(int(labels.max()) + 1 for labels in scope.values())
