"""Drops options that another one replaces at no cost.

Option j of a node replaces option i if both have the same label on every link, so that no neighbor
can tell them apart, and j takes no more in any coordinate: cost, compute and communication of each
window, bytes of each memory row. Of equal ones the first stays.
"""

from __future__ import annotations

import numpy as np

from gt_autoparallel.solver.reduced_problem import Node, ReducedProblem


def drop_dominated(reduced: ReducedProblem) -> None:
    """Drops the dominated options of every node; at least one option of each stays."""
    for index, node in enumerate(reduced.nodes):
        labels = [
            link.labels[link.side(index)].tolist()
            for link in (reduced.links[position] for position in node.links)
            if link is not None
        ]
        groups: dict[tuple[int, ...], list[int]] = {}
        keys = zip(*labels, strict=True) if labels else [()] * len(node.options)
        for option, key in enumerate(keys):
            groups.setdefault(key, []).append(option)
        keep = np.zeros(len(node.options), dtype=bool)
        for group in groups.values():
            keep[_efficient(node, group)] = True
        if not keep.all():
            reduced.keep(index, keep)


def _efficient(node: Node, group: list[int]) -> list[int]:
    """The options of a group that no other of it dominates."""
    if len(group) == 1:
        return group
    rows = [node.cost, *node.compute.values(), *node.communication.values(), *node.memory]
    demands = np.stack(rows)[:, group].T
    kept: list[int] = []
    # In lexicographic order whoever dominates an option comes before it, or equals it.
    for position in np.lexsort(demands.T[::-1]):
        if not any((demands[other] <= demands[position]).all() for other in kept):
            kept.append(int(position))
    return [group[position] for position in kept]
