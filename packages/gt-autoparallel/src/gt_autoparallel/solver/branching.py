"""How a part of the problem is branched: where demands on budgets and windows differ.

With prices fixed the relaxation is nearly always whole; what is fractional is a mix of few choices
that each take too much or too little of a budget or a window. So the node is branched whose options
differ most in that between the choices of the mix, into the options closer to either side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gt_autoparallel.problem import FloatArray, Problem
from gt_autoparallel.solver.reduced_problem import ReducedProblem

__all__ = ["branch"]

BoolArray = NDArray[np.bool_]


def branch(
    reduced: ReducedProblem,
    problem: Problem,
    mix: Sequence[tuple[tuple[int, ...], float]],
    best: tuple[int, ...],
) -> list[list[BoolArray]]:
    """Two parts as masks of the options of each node; together they have all options.

    Args:
        reduced: a node of it has at least two options.
        problem: from which it was made.
        mix: choices with their weights.
        best: the best choice yet, or empty.
    """
    node, mask = _by_demand(reduced, mix) or _by_size(reduced)
    parts = []
    for side in (mask, ~mask):
        masks = [np.ones(len(n.options), dtype=bool) for n in reduced.nodes]
        masks[node] = side
        parts.append(masks)
    return parts


def _by_demand(
    reduced: ReducedProblem, mix: Sequence[tuple[tuple[int, ...], float]]
) -> tuple[int, BoolArray] | None:
    """The node of which the choices of the mix take the most different demands."""
    most, found = 0.0, None
    scale = _memory_scale(reduced)
    for index, node in enumerate(reduced.nodes):
        taken = {choices[index] for choices, _ in mix}
        if len(taken) < 2 or len(node.options) < 2:
            continue
        demands = _demands(reduced, index, scale)
        places = {int(option): place for place, option in enumerate(node.options)}
        weights = np.zeros(len(node.options))
        for choices, weight in mix:
            if choices[index] in places:
                weights[places[choices[index]]] += weight
        used = np.flatnonzero(weights)
        if len(used) < 2:
            continue
        share = weights[used] / weights[used].sum()
        mean = share @ demands[used]
        spread = float((share @ np.abs(demands[used] - mean)).sum())
        if spread > most * (1 + 1e-9):
            axis = int((share @ np.abs(demands[used] - mean)).argmax())
            mask = demands[:, axis] > mean[axis]
            if mask.any() and not mask.all():
                most, found = spread, (index, mask)
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


def _by_size(reduced: ReducedProblem) -> tuple[int, BoolArray]:
    """The node with most links, its options halved by label of its largest link."""
    index = max(
        (i for i, node in enumerate(reduced.nodes) if len(node.options) > 1),
        key=lambda i: (len(reduced.nodes[i].links), len(reduced.nodes[i].options)),
    )
    node = reduced.nodes[index]
    labels = np.arange(len(node.options))
    for position in node.links:
        link = reduced.links[position]
        assert link is not None, "a node has only links that live"
        labels = link.labels[link.side(index)]
        break
    order = np.unique(labels)
    if len(order) < 2:
        labels = np.arange(len(node.options))
        order = labels
    return index, labels < order[len(order) // 2]
