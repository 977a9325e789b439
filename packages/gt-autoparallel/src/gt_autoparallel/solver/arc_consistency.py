"""Drops options that a forbidden pair excludes, again and again until nothing changes (AC-3).

An option may stay only if on each of its node's links some option at the other end may go with
it. This alone decides feasibility on trees, and nearly always in practice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from gt_autoparallel.solver.problem import BoolArray
from gt_autoparallel.solver.reduced_problem import ReducedProblem


def make_arc_consistent(reduced: ReducedProblem, start: Iterable[int] | None = None) -> int | None:
    """Drops every option without support; gives a node without any option left, or None.

    ``start`` are the nodes of which options were dropped since the last time; None: all.
    """
    empty = [index for index, node in enumerate(reduced.nodes) if not len(node.options)]
    if empty:
        return empty[0]
    queue = deque(range(len(reduced.nodes)) if start is None else start)
    waiting = set(queue)
    while queue:
        source = queue.popleft()
        waiting.discard(source)
        for position in tuple(reduced.nodes[source].links):
            link = reduced.links[position]
            if link is None:
                continue
            side = link.side(source)
            target = link.ends[1 - side]
            allowed: BoolArray = np.isfinite(link.cost)
            present = np.zeros(allowed.shape[side], dtype=bool)
            present[link.labels[side]] = True
            table = allowed if side == 0 else allowed.T
            supported = np.logical_or.reduce(table[present], axis=0)[link.labels[1 - side]]
            if supported.all():
                continue
            reduced.removal_log.append((target, position))
            reduced.keep(target, supported)
            if not supported.any():
                return target
            if target not in waiting:
                waiting.add(target)
                queue.append(target)
    return None
