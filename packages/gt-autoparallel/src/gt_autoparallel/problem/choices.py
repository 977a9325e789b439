"""What variables of a problem choose between: options of alike nodes, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gt_autoparallel.graph.layer_names import backward_window
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode
from gt_autoparallel.prices.saved_storages import Status
from gt_autoparallel.problem.clustering import Clustering


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option of a variable: an option of its nodes, and what becomes of their result."""

    option: NodeOption
    status: Status | None


def runs_again(choices: Sequence[Choice]) -> NDArray[np.bool_]:
    """[choices] Whether nodes of a class run again."""
    return np.array([choice.status == "recomputed" for choice in choices])


def makes_again(choices: Sequence[Choice]) -> NDArray[np.bool_]:
    """[choices] Whether memory has in the backward what nodes of a class make again there."""
    again = ("recomputed", "products", "repeated")
    return np.array([choice.status in again for choice in choices])


def first_node(graph: PlacementGraph, clustering: Clustering, number: int) -> PlacementNode:
    """The node that stands for the alike ones of a class."""
    return graph.nodes[clustering.members[number][0]]


def backward_name(graph: PlacementGraph, clustering: Clustering, number: int) -> str:
    """Name of the window in which the backward of a class's layers runs."""
    node = first_node(graph, clustering, number)
    if node.phase == "backward":
        return clustering.window_names[clustering.window_of_class[number]]
    return backward_window(node)
