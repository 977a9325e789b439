"""Which nodes of repeated layers correspond, so that they share one choice.

Two layers are alike if their nodes, in the order of the graph, are alike one by one: same kind,
operator, constants, shapes, dtypes, strides, phase, place in the layer, and operands from the same
places in the layer. What comes from outside may come from different nodes (the first layer reads
the embedding, the others the layer before), but must be a tensor of the same kind. Comparing the
whole descriptions is the proof; nothing is hashed away. Edges between layers stay in the problem:
they connect the choices of the layers' nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.graph.layer_names import layer_of_module, window_name
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """Classes of nodes that share a choice, and of windows."""

    class_of_node: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    """Nodes of each class, in the order of their layers; the first stands for all."""

    window_of_class: tuple[int, ...]
    window_names: tuple[str, ...]
    """Name of each window, after the first layer in it."""

    window_sizes: tuple[int, ...]
    """How many windows of the model each stands for."""


def cluster_layers(
    graph: PlacementGraph,
    *,
    in_turn: Sequence[str] = (),
    distinguished: Mapping[int, Hashable] | None = None,
) -> Clustering:
    """Find alike layers and let their nodes share classes.

    Args:
        graph: whose layers they are.
        in_turn: layers that come before others, in this order; others as their nodes stand.
        distinguished: more about single nodes that alike nodes must have in common.
    """
    extra = distinguished or {}
    layers: dict[str, list[int]] = {layer: [] for layer in in_turn}
    for node in graph.nodes:
        layer = layer_of_module(node.module)
        if layer is not None:
            layers.setdefault(layer, []).append(node.index)
    first_alike: dict[Hashable, str] = {}
    stands_for: dict[str, str] = {}
    for layer, nodes in layers.items():
        container = layer.rpartition(".")[0]
        key = (container, _description(graph, layer, nodes, extra))
        stands_for[layer] = first_alike.setdefault(key, layer)
    representative = list(range(len(graph.nodes)))
    for layer, nodes in layers.items():
        for node_index, first in zip(nodes, layers[stands_for[layer]], strict=True):
            representative[node_index] = first
    return _numbered(graph, representative, [*layers])


def _numbered(
    graph: PlacementGraph, representative: Sequence[int], layers: Sequence[str]
) -> Clustering:
    members: dict[int, list[int]] = defaultdict(list)
    for node, first in enumerate(representative):
        members[first].append(node)
    place_of: dict[str | None, int] = {layer: place for place, layer in enumerate(layers)}
    for nodes in members.values():
        if len(nodes) > 1:
            nodes.sort(key=lambda node: place_of[layer_of_module(graph.nodes[node].module)])
    number = {first: position for position, first in enumerate(members)}
    windows: dict[str, set[str]] = {}
    window_of_class = []
    for first, nodes in members.items():
        name = window_name(graph.nodes[first])
        windows.setdefault(name, set()).update(window_name(graph.nodes[node]) for node in nodes)
        window_of_class.append(name)
    position_of = {name: position for position, name in enumerate(windows)}
    return Clustering(
        class_of_node=tuple(number[first] for first in representative),
        members=tuple(map(tuple, members.values())),
        window_of_class=tuple(position_of[name] for name in window_of_class),
        window_names=tuple(windows),
        window_sizes=tuple(map(len, windows.values())),
    )


def _description(
    graph: PlacementGraph, layer: str, nodes: Sequence[int], extra: Mapping[int, Hashable]
) -> Hashable:
    """All that must be equal in alike layers."""
    place = {node: position for position, node in enumerate(nodes)}
    return tuple(
        (_node_description(graph, graph.nodes[index], layer, place), extra.get(index))
        for index in nodes
    )


def _node_description(
    graph: PlacementGraph, node: PlacementNode, layer: str, place: Mapping[int, int]
) -> Hashable:
    def described(value: Value) -> Hashable:
        inside = place.get(value.node)
        return graph.spec(value) if inside is None else Value(inside, value.output)

    target = node.target
    return (
        node.kind,
        target.removeprefix(layer) if isinstance(target, str) else target,
        node.module.removeprefix(layer),
        node.phase,
        node.constants.replace(f"'{layer}", "'"),
        tuple(map(described, node.operands)),
        node.outputs,
    )
