"""A lower bound, at fixed prices, that knows cycles: nodes are eliminated one after another.

Eliminating a node replaces all factors in which it takes part by one factor over its neighbors:

    f(labels of neighbors) = min_k (cost[k] + sum of the node's factors, each at the option's label)

After the last node a number is left, the exact minimum (Bertele and Brioschi 1972, "Nonserial
Dynamic Programming"). Neighbors enter by the labels that matter, not by their options, which keeps
factors small; graphs of models are nearly chains, so that few neighbors are alive at once. A factor
that would still be too large is split: each part gets an own copy of the node, and the result is a
lower bound (mini-buckets, Dechter and Rish 2003). Messages of the dual ascent make that bound at
least as good as theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gt_autoparallel.solver.problem import FloatArray, IntArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem


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
