"""Some of a model's alike layers recompute this, the others that: how many of each is counted.

Alike layers share a choice, so that under a budget all of them recompute a value or none does, and
what is best lies between. Here alike layers are still placed alike, by options that are given, but
stand in groups of 1, 1, 2, 4, 8, ... layers, each with a choice of its own of what it recomputes:
so any number of layers can recompute a value. Values that go from one layer to another, and what
reads them, are treated alike in all groups: then each layer of a kind has the same costs, whatever
the others do, and a bound of the problem in which all do the same holds here too
(``solver.relaxation``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.problem.clustering import Clustering
from gt_autoparallel.problem.problem_parts import Choice, equality_edge
from gt_autoparallel.solver.problem import Edge, IntArray, Problem


def layer_groups(graph: PlacementGraph, clustering: Clustering) -> dict[str, int]:
    """From each layer to the number of its group among the layers that are alike."""
    alike: dict[int, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for node in graph.nodes:
        layer = layer_of_module(node.module)
        if layer is not None and layer not in seen:
            seen.add(layer)
            alike[clustering.class_of_node[node.index]].append(layer)
    groups: dict[str, int] = {}
    for layers in alike.values():
        for place, layer in enumerate(layers):
            groups[layer] = place.bit_length()  # 0; 1; 2, 3; 4 to 7; ...
    return groups


def crossing_nodes(graph: PlacementGraph) -> frozenset[int]:
    """Nodes of a layer that another layer's nodes read, or that read another layer's."""
    found: set[int] = set()
    for use in graph.uses():
        maker, reader = (
            layer_of_module(graph.nodes[index].module) for index in (use.value.node, use.consumer)
        )
        if maker is not None and maker != reader:
            found.add(use.value.node)
            if reader is not None:
                found.add(use.consumer)
    return frozenset(found)


def kinds_of_choices(choices: Sequence[Choice]) -> IntArray:
    """[choices] A number for each option of nodes: what becomes of results may differ by layer."""
    number = {option: i for i, option in enumerate(dict.fromkeys(c.option for c in choices))}
    return np.array([number[choice.option] for choice in choices], dtype=np.int64)


def with_equal_crossings(
    problem: Problem,
    choices: Sequence[Sequence[Choice]],
    clustering: Clustering,
    shared: Clustering,
    crossing: frozenset[int],
) -> Problem:
    """The problem in which crossing nodes that share a class in ``shared`` have one status."""
    last: dict[int, int] = {}
    edges: list[Edge] = []
    for number, members in enumerate(clustering.members):
        if members[0] not in crossing or len({c.status for c in choices[number]}) < 2:
            continue
        together = shared.class_of_node[members[0]]
        if together in last:
            pair = (last[together], number)
            left, right = (problem.variables[i].name for i in pair)
            statuses = ([choice.status for choice in choices[i]] for i in pair)
            edges.append(equality_edge(f"{left} = {right}", *pair, *statuses))
        last[together] = number
    return replace(problem, edges=(*problem.edges, *edges))
