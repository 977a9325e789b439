"""A lower bound by dual ascent: tree-reweighted messages with prices for windows and budgets.

With a price share s_w in [0, 1] for each window and a price p_r >= 0 for each memory row,

    max(compute_w, communication_w) >= s_w * compute_w + (1 - s_w) * communication_w
    0 >= p_r * (bytes_r - budget_r)

the problem falls apart into options and pairs, for which any messages M give a bound:

    sum_v min_k  (cost_v[k] + sum_e M_ev[label_e(k)])
    + sum_e min_lr (cost_e[l, r] - M_eu[l] - M_ev[r])

Messages are improved node by node, in the order of the nodes and back, as TRW-S does (Kolmogorov
2006, "Convergent Tree-Reweighted Message Passing for Energy Minimization"; in the form of a
reparametrization, Kolmogorov 2015, "A New Look at Reweighted Message Passing"). The bound never
falls while prices stay, and one sweep and back is exact on a tree whose order fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from gt_autoparallel.solver.problem import BoolArray, FloatArray, IntArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Lagrange multipliers of what couples nodes beyond links."""

    windows: FloatArray
    """[windows] Share of the window's price that compute bears."""

    memory: FloatArray
    """[memory rows] us per byte."""


@dataclass(slots=True)
class _End:
    """A link as one of its nodes sees it."""

    link: int
    side: int
    other: int
    labels: IntArray
    order: IntArray
    """Options sorted by label."""
    starts: IntArray
    """Where each label begins in that order."""

    def label_minima(self, values: FloatArray) -> FloatArray:
        """[labels] The least of ``values`` [K] among the options of each label."""
        return np.minimum.reduceat(values[self.order], self.starts)


class DualAscent:
    """The bound's state: prices, and messages, which stay in the problem's links.

    Made anew whenever options were dropped from the problem. Every link must have every label in
    use (``ReducedProblem.compact_links``).
    """

    def __init__(self, reduced: ReducedProblem, prices: Prices) -> None:
        self._reduced = reduced
        self._ends: list[list[_End]] = [[] for _ in reduced.nodes]
        for index, link in reduced.live_links():
            for side in (0, 1):
                labels = link.labels[side]
                order = np.argsort(labels, kind="stable")
                starts = np.searchsorted(labels[order], np.arange(link.cost.shape[side]))
                end = _End(index, side, link.ends[1 - side], labels, order, starts)
                self._ends[link.ends[side]].append(end)
        self._later = [
            sum(end.other > node for end in ends) for node, ends in enumerate(self._ends)
        ]
        self._node_bounds = np.zeros(len(reduced.nodes))
        self._option_bounds: list[FloatArray] = []
        self._tables: dict[int, FloatArray] = {}
        self._costs: list[FloatArray] = []
        self.set_prices(prices)

    def set_prices(self, prices: Prices) -> None:
        """Sets the prices; the bound may rise or fall."""
        reduced = self._reduced
        self.prices = prices
        compute = reduced.multiplicity * prices.windows
        communication = reduced.multiplicity - compute
        self._constant = reduced.constant_us - float(prices.memory @ reduced.budget_bytes)
        self._costs = []
        for node in reduced.nodes:
            cost = node.cost + prices.memory @ node.memory
            for window, times in node.compute.items():
                cost = cost + compute[window] * times
            for window, times in node.communication.items():
                cost = cost + communication[window] * times
            self._costs.append(cost)
        for index, link in reduced.live_links():
            table = link.cost
            for window, times in link.communication.items():
                table = table + communication[window] * times
            self._tables[index] = table
        self._balanced = False

    @property
    def swept_bound(self) -> float:
        """The bound after a whole sweep: then the tables' part of it is 0."""
        return self._constant + math.fsum(self._node_bounds)

    def potentials(self) -> tuple[float, list[FloatArray], dict[int, FloatArray]]:
        """The problem at these prices with the messages moved: a constant, costs and tables.

        Any choice costs the same as without messages.
        """
        costs = [self._with_messages(node, ends) for node, ends in enumerate(self._ends)]
        tables = {}
        for index, link in self._reduced.live_links():
            left, right = link.messages
            tables[index] = self._tables[index] - left[:, None] - right
        return self._constant, costs, tables

    def _with_messages(self, node: int, ends: list[_End]) -> FloatArray:
        values = self._costs[node].copy()
        links = self._reduced.links
        for end in ends:
            values += links[end.link].messages[end.side][end.labels]  # type: ignore[union-attr]  # the link lives
        return values

    def sweep(self, *, forward: bool) -> None:
        """Improves the messages once, in the order of the nodes or against it."""
        self._sweep(forward=forward, positions=None)

    def decoding_sweep(self, *, forward: bool) -> IntArray:
        """Sweeps, and gives [nodes] positions of a choice decoded on the way.

        Each node takes what costs least given the nodes before it, and as the messages see the
        nodes after it.
        """
        positions = np.zeros(len(self._ends), dtype=np.int64)
        self._sweep(forward=forward, positions=positions)
        return positions

    def _sweep(self, *, forward: bool, positions: IntArray | None) -> None:
        count = len(self._ends)
        self._option_bounds = [np.zeros(0)] * count
        total = self._constant + math.fsum(self._node_bounds)
        links = self._reduced.links
        for node in range(count) if forward else range(count - 1, -1, -1):
            ends = self._ends[node]
            belief = self._costs[node].copy()
            given = belief.copy() if positions is not None else belief
            ahead = []
            for end in ends:
                link = links[end.link]
                assert link is not None, "only links that live have ends"
                message = link.messages[end.side][end.labels]
                belief += message
                if (end.other > node) == forward:
                    ahead.append((end, link))
                    if positions is not None:
                        given += message
                elif positions is not None:
                    table = self._tables[end.link]
                    chosen = link.labels[1 - end.side][positions[end.other]]
                    row = table[:, chosen] if end.side == 0 else table[chosen]
                    given += row[end.labels]
            least = float(belief.min())
            total += least - self._node_bounds[node]
            self._node_bounds[node] = least
            self._option_bounds[node] = belief + (total - least) if self._balanced else belief
            if positions is not None:
                best = int(given.argmin())
                positions[node] = best if given[best] < math.inf else int(belief.argmin())
            if not ahead:
                continue
            later = self._later[node]
            share = 1.0 / max(later, len(ends) - later)
            spare = (belief - least) * share
            for end, link in ahead:
                table = self._tables[end.link]
                own = link.messages[end.side] - end.label_minima(spare)
                link.messages[end.side] = own
                rest = table - own[:, None] if end.side == 0 else table - own
                link.messages[1 - end.side] = rest.min(axis=end.side)
        # After a whole sweep the least entry of every table without its messages is 0, so that
        # the bounds of the nodes add up to the bound.
        self._balanced = True

    def bound_within(self, masks: Sequence[BoolArray], *, penalty_us: float) -> float:
        """What any choice costs at least that takes of each node only what its mask [K] allows.

        The bound of all choices after one sweep from here, where every other option costs
        ``penalty_us`` more: it holds whatever that is. Prices and messages stay as they are.
        """
        ends = [(link, list(link.messages)) for _, link in self._reduced.live_links()]
        penalized = copy(self)
        penalized._costs = [
            cost + np.where(mask, 0.0, penalty_us)
            for cost, mask in zip(self._costs, masks, strict=True)
        ]
        penalized._node_bounds = np.zeros(len(masks))
        penalized.sweep(forward=False)
        for link, messages in ends:
            link.messages = messages
        return penalized.swept_bound

    def option_bounds(self) -> list[FloatArray]:
        """For each node [K]: what any choice that takes the option costs at least.

        Of the state at the node's turn in the last sweep, which must not have been the first one
        with its prices.
        """
        return self._option_bounds
