"""How a part of the problem is branched: where demands on budgets and windows differ.

With prices fixed the relaxation is nearly always whole; what is fractional is a mix of few choices
that each take too much or too little of a budget or a window. So the node is branched whose mixed
options differ most in that, into the options closer to either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gt_autoparallel.solver.message_passing import Prices
from gt_autoparallel.solver.problem import BoolArray, FloatArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem


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
