"""Which layers take turns in the backward, and which gradients come in a layer's turn.

A layer has a turn if all that it computes stands together, in the forward and in the backward, and
if the backward takes layers from the last to the first. What gathers parameters and what brings
gradients home does not count, as it may stand anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby

from gt_autoparallel.graph.layer_names import layer_of_module, window_scope
from gt_autoparallel.graph.parameter_chains import (
    gradient_chains,
    is_view_like,
    parameter_chains,
)
from gt_autoparallel.graph.placement_graph import NodePhase, PlacementGraph, PlacementNode

_PHASES: tuple[NodePhase, NodePhase] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTurns:
    """Layers that let go of what they saved one after the other; none if it is all at once."""

    layers: tuple[str, ...] = ()
    """In the order of their forwards."""

    gradients: Mapping[int, str]
    """Gradient nodes -> the layer in whose turn they come. A parameter that anything outside of its
    layer reads has parts of its gradient earlier, and is not among them."""

    ends: Mapping[str, int]
    """Layers -> the last node that computes for them in the backward; of all layers that have
    one. What is read later, of what a layer saved, does not go with it."""


NO_TURNS = LayerTurns(gradients={}, ends={})


def layer_turns(graph: PlacementGraph) -> LayerTurns:
    """The layers that compute in both phases, and their gradients.

    None has a turn if one has not: a layer that runs twice, or partly before another one and partly
    after it, may need at any time what others have saved.
    """
    computing = computing_nodes(graph)
    in_forward, in_backward = (
        [layer_of_module(node.module) for node in computing[phase]] for phase in _PHASES
    )
    both = {layer for layer in in_forward if layer is not None} & {*in_backward}
    forward, backward = (
        [layer for layer, _ in groupby(layer for layer in layers if layer in both)]
        for layers in (in_forward, in_backward)
    )
    ends = {window_scope(node): node.index for node in computing["backward"]}
    if len(both) != len(forward) or forward != backward[::-1]:
        return LayerTurns(gradients={}, ends=ends)
    readers = _readers_of_parameters(graph)
    gradients = {}
    for node in graph.of_kind("gradient"):
        layer = layer_of_module(node.module)
        if layer in both and readers[str(node.target)] <= {layer}:
            gradients[node.index] = layer
    return LayerTurns(layers=tuple(filter(None, forward)), gradients=gradients, ends=ends)


def read_late(
    graph: PlacementGraph, turns: LayerTurns, *, may_run_again: Collection[int] = ()
) -> frozenset[int]:
    """Nodes of the forward that the backward may read after the end of their layer's.

    Whoever reads a view may read what it views, and whoever reads what runs again what that reads.
    """
    read_last = [0] * len(graph.nodes)
    for node in reversed(graph.nodes):
        reads_until = 0
        if node.phase == "backward":
            reads_until = node.index
        elif is_view_like(node) or node.index in may_run_again:
            reads_until = read_last[node.index]
        for value in node.operands:
            read_last[value.node] = max(read_last[value.node], reads_until)
    return frozenset(
        node.index
        for node in graph.nodes
        if node.phase == "forward"
        and read_last[node.index] > turns.ends.get(window_scope(node), len(graph.nodes))
    )


def computing_nodes(graph: PlacementGraph) -> Mapping[NodePhase, list[PlacementNode]]:
    """What computes in each phase, in order; not what gathers parameters, nor after gradients."""
    aside = {*parameter_chains(graph), *gradient_chains(graph)}
    found: dict[NodePhase, list[PlacementNode]] = {phase: [] for phase in _PHASES}
    for node in graph.nodes:
        if node.kind in ("operator", "experts") and node.index not in aside:
            found[node.phase].append(node)
    return found


def _readers_of_parameters(graph: PlacementGraph) -> Mapping[str, set[str | None]]:
    """Parameters, by name -> the layers whose nodes read them; None: what is in no layer."""
    parameter_of = parameter_chains(graph)
    readers: dict[str, set[str | None]] = defaultdict(set)
    for node in graph.nodes:
        for value in node.operands:
            name = parameter_of.get(value.node)
            if name is None or node.index in parameter_of:
                continue
            if node.kind == "share":
                parameter_of[node.index] = name
            else:
                readers[name].add(layer_of_module(node.module))
    return readers
