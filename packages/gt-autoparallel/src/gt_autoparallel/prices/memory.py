"""Bytes that a placed model takes on each rank: of single choices, and of a whole plan.

    parameters + gradients + optimizer state + what the forward saves for the backward

Saved is each storage that a forward node makes and a backward node reads, whole and once, however
many values lie in it and however small a part of it they are (``saved_storages``). Gathered
parameters that the backward reads are among them, since one gathering serves forward and backward.
Routed experts say themselves what they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gt_autoparallel.graph.layouts import Layout, MeshShape, num_local_elements
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, TensorSpec, Value
from gt_autoparallel.prices.experts import experts_saved_bytes
from gt_autoparallel.prices.saved_storages import (
    SavedStorages,
    Status,
    is_view_like,
    saved_storages,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on each rank."""

    parameters: int
    gradients: int
    optimizer_state: int
    saved_activations: int
    """Forward values that the backward reads, each storage once."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer_state + self.saved_activations


def option_bytes(
    graph: PlacementGraph,
    node: PlacementNode,
    option: NodeOption,
    mesh: MeshShape,
    *,
    saved: SavedStorages,
    status: Status | None,
    optimizer_state_copies: float,
) -> float:
    """Bytes that one node takes on each rank if it runs with ``option``.

    ``status`` is that of a view-like node on the way to something saved, else None.
    """
    total = sum(
        _bytes(spec, layout, mesh)
        for position, (spec, layout) in enumerate(zip(node.outputs, option.outputs, strict=True))
        if spec is not None and Value(node.index, position) in saved.values
    )
    if status == "moved":
        total += _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
    if node.kind == "parameter":
        (spec,) = node.outputs
        return _bytes(spec, option.outputs[0], mesh) * (1 + optimizer_state_copies)
    if node.kind == "gradient":
        total += _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
    if node.kind == "experts":
        operands = graph.operand_specs(node)
        total += experts_saved_bytes(node, operands, option, mesh)
    return total


def plan_memory(
    graph: PlacementGraph,
    options: Sequence[NodeOption],
    mesh: MeshShape,
    *,
    optimizer_state_copies: float,
) -> MemoryBreakdown:
    """The bytes of a whole plan: ``options`` are the chosen ones of all nodes."""
    saved = saved_storages(graph)
    parameters = gradients = activations = 0
    # From the last view down: is the storage that a value lies in needed?
    needed = {index for index in saved.statuses if "idle" not in saved.statuses[index]}
    for node in reversed(graph.nodes):
        option = options[node.index]
        if node.kind == "parameter":
            parameters += _bytes(node.outputs[0], option.outputs[0], mesh)
        elif node.kind == "gradient":
            gradients += _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
        elif node.kind == "experts":
            operands = graph.operand_specs(node)
            activations += experts_saved_bytes(node, operands, option, mesh)
        for position, (spec, layout) in enumerate(zip(node.outputs, option.outputs, strict=True)):
            if Value(node.index, position) in saved.values:
                activations += _bytes(spec, layout, mesh)
        if node.index not in needed or not is_view_like(node):
            continue
        source = node.operands[0]
        moved = options[source.node].outputs[source.output] != option.operands[0]
        if moved or saved.statuses[node.index] in (("moved",), ("idle", "moved")):
            activations += _bytes(graph.spec(source), option.operands[0], mesh)
        elif source.node in saved.statuses:
            needed.add(source.node)
    return MemoryBreakdown(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=round(parameters * optimizer_state_copies),
        saved_activations=activations,
    )


def _bytes(spec: TensorSpec | None, layout: Layout | None, mesh: MeshShape) -> int:
    assert spec is not None, "what takes memory is a tensor"
    assert layout is not None, "a tensor has a layout"
    return num_local_elements(spec.shape, layout, mesh) * spec.dtype.itemsize
