"""Bytes that a placed model takes on each rank: of single choices, and of a whole plan.

Most is there at one of three moments, of which the fullest one counts:

    at the loss       parameters + optimizer state + what the forward saves for the backward
                      + the loss + gradients of microbatches before
    in the backward   parameters + optimizer state + what the forward saves for the backward
                      + gradients + what is computed again in the layer where that is most
                      + what is gathered ahead of the next one
    at a reduction    parameters + optimizer state + what the forward saves for the backward,
                      without that of the layer whose backward ends
                      + gradients + what is in flight: that layer's gradients before they are
                      reduced, twice, since a bucket is a copy, and what is gathered ahead

Saved is each storage that a forward node makes and a backward node reads, whole and once, however
many values lie in it and however small a part of it they are (``saved_storages``). Gathered
parameters that the backward reads are among them, since one gathering serves forward and backward
unless it is recomputed; then the next layer's are gathered while one computes, which is counted as
if that were as large. What is computed again is not saved, and what that reads is. Routed experts
say themselves what they keep.

Of a graph that runs for several microbatches (``microbatches``), what is saved is there for each
live one and gathered parameters once; gradients are the sums that wait for their reduction, and
nothing is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial

from gt_autoparallel.graph.layer_names import layer_of_module, window_scope
from gt_autoparallel.graph.layouts import Layout, MeshShape, num_local_elements
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, TensorSpec, Value
from gt_autoparallel.prices.experts import experts_inner_bytes, experts_product_bytes
from gt_autoparallel.prices.microbatches import (
    Microbatches,
    accumulated_gradients,
    gathered_parameters,
)
from gt_autoparallel.prices.recomputability import experts_of
from gt_autoparallel.prices.saved_storages import SOURCES, SavedStorages, Status

_MARGIN = 0.1
"""Share of a device's memory that no plan may count on. It is for what a plan does not count:
results of operators that nobody saves, gradients of activations, what an allocator loses between
blocks."""


def device_budget_bytes(capacity_bytes: int) -> int:
    """What a plan may take of a device: all of its memory but a tenth."""
    return int(capacity_bytes * (1.0 - _MARGIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on each rank, of all that is there at the loss or in the backward."""

    parameters: int
    gradients: int
    """At the end of the backward; with those of microbatches before, where they are kept apart."""

    optimizer_state: int
    saved_activations: int
    """Forward values that the backward reads, each storage once."""

    recomputed: int = 0
    """What one layer's backward computes again, of the layer where that is most."""

    loss: int = 0
    """What the loss takes, which is let go before the first layer's backward."""

    gradients_before: int = 0
    """Those of microbatches before, which are there at the loss."""

    gathered_ahead: int = 0
    """What is gathered for the next layer while the one computes that computes most again."""

    in_flight: int = 0
    """At the end of a layer's backward: its gradients before they are reduced, and what is gathered
    ahead. Of the layer where most is there then."""

    let_go: int = 0
    """Of the saved activations what that layer had, which is gone then."""

    @property
    def at_loss(self) -> dict[str, int]:
        """Bytes by kind, in words, when the loss is computed."""
        return self._parts(gradients=self.gradients_before, loss=self.loss)

    @property
    def in_backward(self) -> dict[str, int]:
        """Bytes by kind, in words, in the backward of the layer that makes most again."""
        return self._parts(
            gradients=self.gradients, recomputed=self.recomputed, ahead=self.gathered_ahead
        )

    @property
    def at_reduction(self) -> dict[str, int]:
        """Bytes by kind, in words, when the gradients of a layer are reduced."""
        saved = self.saved_activations - self.let_go
        return self._parts(gradients=self.gradients, saved=saved, in_flight=self.in_flight)

    @property
    def parts(self) -> dict[str, int]:
        """Those of the fullest moment."""
        moments = (self.in_backward, self.at_loss, self.at_reduction)
        return max(moments, key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    def _parts(
        self,
        *,
        gradients: int,
        saved: int | None = None,
        loss: int = 0,
        recomputed: int = 0,
        ahead: int = 0,
        in_flight: int = 0,
    ) -> dict[str, int]:
        """Nothing of what is not everywhere, where it is not there."""
        return {
            "parameters": self.parameters,
            **({"gradients": gradients} if gradients else {}),
            "optimizer state": self.optimizer_state,
            "saved activations": self.saved_activations if saved is None else saved,
            **({"loss": loss} if loss else {}),
            **({"recomputed": recomputed} if recomputed else {}),
            **({"gathered ahead": ahead} if ahead else {}),
            **({"in flight": in_flight} if in_flight else {}),
        }


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
            _bytes(spec, layout, mesh)
            for position, (spec, layout) in enumerate(
                zip(node.outputs, option.outputs, strict=True)
            )
            if spec is not None and Value(node.index, position) in saved.values
        )
    if status == "moved":
        total += _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
    total *= saved.num_copies(node)
    if node.kind == "parameter":
        (spec,) = node.outputs
        return _bytes(spec, option.outputs[0], mesh) * (1 + optimizer_state_copies)
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
    return _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)


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
        return _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
    return sum(
        _bytes(spec, layout, mesh)
        for spec, layout in zip(node.outputs, option.outputs, strict=True)
        if spec is not None
    )


def plan_memory(
    graph: PlacementGraph,
    options: Sequence[NodeOption],
    mesh: MeshShape,
    *,
    optimizer_state_copies: float,
    recomputed: Collection[int] = (),
    microbatches: Microbatches | None = None,
    loss_bytes: int = 0,
    accumulates_gradients: bool = False,
) -> MemoryBreakdown:
    """The bytes of a whole plan.

    ``options`` are the chosen ones of all nodes, ``recomputed`` the nodes that run again; the rest
    is as in ``ResolvedRequest``.
    """
    accumulated = None if microbatches is None else accumulated_gradients(graph)
    parameters = gradients = 0
    for node in graph.nodes:
        option = options[node.index]
        if node.kind == "parameter":
            parameters += _bytes(node.outputs[0], option.outputs[0], mesh)
        gradients += gradient_bytes(graph, node, option, mesh, accumulated=accumulated)
    of_layers = layer_memory(graph, options, mesh, recomputed=recomputed, microbatches=microbatches)
    copies = gradient_copies(microbatches, accumulates_gradients=accumulates_gradients)
    again, ahead = of_layers.most_again
    in_flight, let_go = of_layers.most_in_flight
    return MemoryBreakdown(
        parameters=parameters,
        gradients=int(gradients * copies.in_backward),
        optimizer_state=round(parameters * optimizer_state_copies),
        saved_activations=sum(of_layers.saved.values()),
        recomputed=again,
        loss=loss_bytes,
        gradients_before=gradients * copies.at_loss,
        gathered_ahead=ahead,
        in_flight=in_flight,
        let_go=let_go,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCopies:
    """How often the gradients of all parameters are there, at two moments of a microbatch."""

    at_loss: int
    in_backward: float
    """The second ones are those of one microbatch, of which a graph counts its part."""


def gradient_copies(
    microbatches: Microbatches | None, *, accumulates_gradients: bool
) -> GradientCopies:
    """Those of the last microbatch of a step: the sums, and what is going to be added to them.

    ``accumulates_gradients`` says that whoever runs the graph adds them up.
    """
    if microbatches is not None:
        return GradientCopies(at_loss=1, in_backward=1 + 1 / microbatches.num_graphs)
    before = int(accumulates_gradients)
    return GradientCopies(at_loss=before, in_backward=1 + before)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes on each rank, by layers and by top-level modules outside of them."""

    saved: Mapping[str, int]
    """What the forward makes and the backward reads."""

    again: Mapping[str, int]
    """What the backward computes again; of several graphs that take turns, this one's part."""

    ahead: Mapping[str, int]
    """Of that, the gathered parameters, of which the next layer's are there, too."""

    unreduced: Mapping[str, int]
    """Gradients before they are reduced, as they are made and in their bucket."""

    @property
    def most_again(self) -> tuple[int, int]:
        """What the layer that makes most makes again, and what is gathered ahead then."""
        of_layers = [(again, self.ahead.get(scope, 0)) for scope, again in self.again.items()]
        return max(of_layers, key=lambda each: (sum(each), each), default=(0, 0))

    @property
    def most_in_flight(self) -> tuple[int, int]:
        """What is in flight when a layer's backward ends, and what that layer had saved."""
        of_layers = [
            (unreduced + self.ahead.get(scope, 0), self.saved.get(scope, 0))
            for scope, unreduced in self.unreduced.items()
        ]
        return max(of_layers, key=lambda each: (each[0] - each[1], each), default=(0, 0))


def layer_memory(
    graph: PlacementGraph,
    options: Sequence[NodeOption],
    mesh: MeshShape,
    *,
    recomputed: Collection[int] = (),
    microbatches: Microbatches | None = None,
) -> LayerMemory:
    """What each layer of a plan keeps and makes again; arguments as for ``plan_memory``."""
    num_live = 1 if microbatches is None else microbatches.num_live
    num_graphs = 1 if microbatches is None else microbatches.num_graphs
    gathered = gathered_parameters(graph)
    reduced = accumulated_gradients(graph) if microbatches is None else {}
    saved: dict[str, int] = defaultdict(int)
    again: dict[str, int] = defaultdict(int)
    ahead: dict[str, int] = defaultdict(int)
    unreduced: dict[str, int] = defaultdict(int)
    storages = needed_storages(graph, options, recomputed)
    forward_of = {backward: forward for forward, backward in experts_of(graph).items()}
    for node in graph.nodes:
        option, scope = options[node.index], window_scope(node)
        in_bucket = unreduced_bytes(graph, node, option, mesh, reduced=reduced)
        if in_bucket:
            unreduced[scope] += in_bucket
        keeps_products = node.phase == "backward" and node.index in storages.recomputed
        if node.index in forward_of and forward_of[node.index] not in storages.recomputed:
            inner_bytes = experts_product_bytes if keeps_products else experts_inner_bytes
            operands = graph.operand_specs(node)
            saved[scope] += inner_bytes(node, operands, option, mesh) * num_live
        if node.index in storages.recomputed:
            made = recomputed_bytes(graph, node, option, mesh, keeps_products=keeps_products)
            again[scope] += made
            if node.index in gathered:
                ahead[scope] += made
        if node.index not in storages.kept:
            continue
        num_copies = 1 if microbatches is not None and node.index in gathered else num_live
        if is_view_like(node):
            moved = _bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
            saved[scope] += moved * num_copies
        else:
            saved[scope] += num_copies * sum(
                _bytes(node.outputs[position], option.outputs[position], mesh)
                for position in storages.kept[node.index]
            )
    return LayerMemory(
        saved=saved,
        again={scope: size // num_graphs for scope, size in again.items()},
        ahead=ahead,
        unreduced=unreduced,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededStorages:
    """Where what is needed of the forward in the backward lies; nothing of what runs again."""

    kept: Mapping[int, tuple[int, ...]]
    """Nodes with a storage of their own that is kept -> their outputs that are needed. Of view-like
    nodes it is what they view, moved."""

    aliased: frozenset[int]
    """View-like nodes that are needed, and lie in what they view."""

    recomputed: tuple[int, ...]
    """Nodes that run again, and not for nobody, in order. Of routed experts what their backward
    reads besides their operands; their result is kept if it is needed. A backward of routed experts
    among them makes again what lies between the products of its forward."""


def needed_storages(
    graph: PlacementGraph, options: Sequence[NodeOption], recomputed: Collection[int]
) -> NeededStorages:
    """Find what the backward, and what of ``recomputed`` runs again for it, need of the forward."""
    needed: set[Value] = set()
    again: list[int] = []
    kept: dict[int, tuple[int, ...]] = {}
    aliased: set[int] = set()
    # From the last reader to the first maker.
    for node in reversed(graph.nodes):
        if node.phase == "backward":
            needed.update(node.operands)
            if node.kind == "experts" and node.index in recomputed:
                again.append(node.index)
            continue
        outputs = tuple(
            position
            for position in range(len(node.outputs))
            if Value(node.index, position) in needed
        )
        if node.kind == "experts" and node.index in recomputed:
            again.append(node.index)  # inside of its backward: its result stays what it was
        elif node.index in recomputed and outputs:
            again.append(node.index)
            needed.update(node.operands)
            continue
        if not outputs or node.kind in SOURCES:
            continue
        if is_view_like(node):
            source = node.operands[0]
            if options[source.node].outputs[source.output] == options[node.index].operands[0]:
                aliased.add(node.index)
                needed.add(source)
                continue
        kept[node.index] = outputs
    return NeededStorages(kept=kept, aliased=frozenset(aliased), recomputed=tuple(reversed(again)))


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


def _bytes(spec: TensorSpec | None, layout: Layout | None, mesh: MeshShape) -> int:
    assert spec is not None, "what takes memory is a tensor"
    assert layout is not None, "a tensor has a layout"
    return num_local_elements(spec.shape, layout, mesh) * spec.dtype.itemsize
