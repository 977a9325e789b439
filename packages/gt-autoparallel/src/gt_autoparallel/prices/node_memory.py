"""Bytes of single choices: what a node of a placed model takes with one of its options.

Which moments they belong to is in ``memory``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Partial

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import Layout, MeshShape, num_local_elements
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, TensorSpec, Value
from gt_autoparallel.prices.experts import experts_inner_bytes, experts_product_bytes
from gt_autoparallel.prices.saved_storages import SavedStorages, Status


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
    """Bytes that one node takes on each rank from the forward on if it runs with ``option``.

    ``status`` is that of a node whose bytes depend on it, else None. Neither gradients nor what is
    recomputed are among them: see ``gradient_bytes`` and ``recomputed_bytes``.
    """
    total = 0
    if status not in ("idle", "recomputed"):
        total = sum(
            layout_bytes(spec, layout, mesh)
            for position, (spec, layout) in enumerate(
                zip(node.outputs, option.outputs, strict=True)
            )
            if spec is not None and Value(node.index, position) in saved.values
        )
    if status == "moved":
        total += layout_bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
    total *= saved.num_copies(node)
    if node.kind == "parameter":
        (spec,) = node.outputs
        return layout_bytes(spec, option.outputs[0], mesh) * (1 + optimizer_state_copies)
    if node.kind == "experts" and node.phase == "backward" and status != "repeated":
        inner_bytes = experts_product_bytes if status == "products" else experts_inner_bytes
        operands = graph.operand_specs(node)
        total += inner_bytes(node, operands, option, mesh) * saved.num_live
    return total


def gradient_bytes(
    graph: PlacementGraph,
    node: PlacementNode,
    option: NodeOption,
    mesh: MeshShape,
    *,
    accumulated: Mapping[Value, int] | None,
) -> int:
    """Bytes of parameters' gradients that one node makes on each rank.

    ``accumulated`` are the sums over microbatches that gradients wait in; None: they are reduced.
    """
    if accumulated is not None:
        return _accumulated_bytes(graph, node, option, mesh, accumulated)
    if node.kind != "gradient":
        return 0
    return layout_bytes(graph.spec(node.operands[0]), option.operands[0], mesh)


def unreduced_bytes(
    graph: PlacementGraph,
    node: PlacementNode,
    option: NodeOption,
    mesh: MeshShape,
    *,
    reduced: Mapping[Value, int],
) -> int:
    """Bytes of what one node makes for gradients that are then reduced, and of their bucket.

    ``reduced`` are the values that become gradients -> bytes of an element when it is reduced. Of
    what is outside of layers nothing counts.
    """
    if layer_of_module(node.module) is None:
        return 0
    total = 0
    for position, (spec, layout) in enumerate(zip(node.outputs, option.outputs, strict=True)):
        itemsize = reduced.get(Value(node.index, position))
        if itemsize is None or not any(isinstance(each, Partial) for each in layout or ()):
            continue
        assert spec is not None, "a gradient is a tensor"
        assert layout is not None, "a tensor has a layout"
        total += num_local_elements(spec.shape, layout, mesh) * (itemsize + spec.dtype.itemsize)
    return total


def recomputed_bytes(
    graph: PlacementGraph,
    node: PlacementNode,
    option: NodeOption,
    mesh: MeshShape,
    *,
    keeps_products: bool = False,
) -> int:
    """Bytes that one node makes on each rank if it runs again: all its outputs.

    A view-like node runs again only if it is moved, and makes what arrives. Routed experts make
    what their backward reads, at whose node it may be asked for, too; but for results of products
    if it ``keeps_products``.
    """
    if node.kind == "experts":
        operands = graph.operand_specs(node)
        made = experts_inner_bytes(node, operands, option, mesh)
        if not keeps_products:
            return made
        return max(0, made - experts_product_bytes(node, operands, option, mesh))
    if is_view_like(node):
        return layout_bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
    return sum(
        layout_bytes(spec, layout, mesh)
        for spec, layout in zip(node.outputs, option.outputs, strict=True)
        if spec is not None
    )


def _accumulated_bytes(
    graph: PlacementGraph,
    node: PlacementNode,
    option: NodeOption,
    mesh: MeshShape,
    accumulated: Mapping[Value, int],
) -> int:
    """Bytes of the sums over microbatches of what a node makes."""
    total = 0
    for position, layout in enumerate(option.outputs):
        value = Value(node.index, position)
        if value in accumulated:
            assert layout is not None, "a gradient is a tensor"
            elements = num_local_elements(graph.spec(value).shape, layout, mesh)
            total += elements * accumulated[value]
    return total


def layout_bytes(spec: TensorSpec | None, layout: Layout | None, mesh: MeshShape) -> int:
    """Bytes on each rank of a tensor in a layout."""
    assert spec is not None, "what takes memory is a tensor"
    assert layout is not None, "a tensor has a layout"
    return num_local_elements(spec.shape, layout, mesh) * spec.dtype.itemsize
