"""What each layer of a plan keeps and makes again, and when in the backward most is there.

When a layer's backward runs, layers after it have let go of what they saved, and those before it
have no gradients yet. By that alone too little would count: gradients of activations are in no
account, and are most where nothing is let go of. So each layer counts at two moments: with all that
is saved and no layer's gradients but its own, and in its turn, with what the layers up to it saved
and the gradients of those from it on. Of layers that are alike those moments are fullest for the
last one and for the first. What is outside of layers counts at any moment. Where layers take no
turns (``graph.layer_turns``) everything does, but for what a layer saved where its backward ends.
What is read even later stays there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.graph.layer_names import window_scope
from gt_autoparallel.graph.layer_turns import NO_TURNS, layer_turns
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, Value
from gt_autoparallel.prices.experts import experts_inner_bytes, experts_product_bytes
from gt_autoparallel.prices.microbatches import (
    Microbatches,
    accumulated_gradients,
    gathered_parameters,
)
from gt_autoparallel.prices.needed_storages import needed_storages
from gt_autoparallel.prices.node_memory import (
    gradient_bytes,
    layout_bytes,
    recomputed_bytes,
    unreduced_bytes,
)
from gt_autoparallel.prices.recomputability import experts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardMoment:
    """Bytes at one moment of a layer's backward."""

    made: int
    """What the layer has then that is not saved: computed again, or in flight."""

    ahead: int = 0
    """What is gathered ahead of the next layer, where that is not among the former."""

    let_go: int
    """Of what is saved in all: what is gone by then."""

    to_come: int
    """Of all gradients: what is not there yet."""

    @property
    def size(self) -> int:
        """By how much more is there than all that is saved and all gradients."""
        return self.made + self.ahead - self.let_go - self.to_come


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes on each rank, by layers and by top-level modules outside of them."""

    saved: Mapping[str, int]
    """What the forward makes and the backward reads."""

    read_late: Mapping[str, int]
    """Of that, what is read after the end of the layer's backward."""

    again: Mapping[str, int]
    """What the backward computes again; of several graphs that take turns, this one's part."""

    ahead: Mapping[str, int]
    """Of that, the gathered parameters, of which the next layer's are there, too."""

    unreduced: Mapping[str, int]
    """Gradients before they are reduced, as they are made and in their bucket."""

    gradients: Mapping[str, int]
    """Gradients of parameters that come in a layer's turn."""

    layers: tuple[str, ...]
    """Those that take turns, in the order of their forwards. None of a graph that runs for several
    microbatches, as others are live then."""

    @property
    def fullest_backward(self) -> BackwardMoment:
        """The moment of a backward at which most is there."""
        moments = [
            BackwardMoment(
                made=self.again.get(layer, 0),
                ahead=self.ahead.get(layer, 0),
                let_go=let_go,
                to_come=to_come,
            )
            for layer, let_go, to_come in self._turns()
        ]
        return _fullest(moments) or BackwardMoment(made=0, let_go=0, to_come=0)

    @property
    def fullest_reduction(self) -> BackwardMoment | None:
        """The moment at which most is there of those where a layer's backward ends."""
        return _fullest(
            [
                BackwardMoment(
                    made=self.unreduced[layer] + self.ahead.get(layer, 0),
                    let_go=let_go + self._let_go(layer),
                    to_come=to_come,
                )
                for layer, let_go, to_come in self._turns()
                if layer in self.unreduced
            ]
        )

    def _turns(self) -> Iterator[tuple[str, int, int]]:
        """Layers, each with what is let go of then and what gradients are to come, twice."""
        for scope in self.again.keys() | self.unreduced.keys():
            if scope not in self.layers:
                yield scope, 0, 0
        earlier, later = 0, sum(map(self._let_go, self.layers))
        in_all = sum(self.gradients.values())
        for layer in self.layers:
            own = self.gradients.get(layer, 0)
            later -= self._let_go(layer)
            yield layer, 0, in_all - own
            yield layer, later, earlier
            earlier += own

    def _let_go(self, layer: str) -> int:
        """What a layer saved and lets go of at the end of its backward."""
        return self.saved.get(layer, 0) - self.read_late.get(layer, 0)


def _fullest(moments: Sequence[BackwardMoment]) -> BackwardMoment | None:
    def key(moment: BackwardMoment) -> tuple[int, ...]:
        return (moment.size, moment.made, moment.ahead, moment.let_go)

    return max(moments, key=key, default=None)


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
    late: dict[str, int] = defaultdict(int)
    again: dict[str, int] = defaultdict(int)
    ahead: dict[str, int] = defaultdict(int)
    unreduced: dict[str, int] = defaultdict(int)
    storages = needed_storages(graph, options, recomputed)
    gradients: dict[str, int] = defaultdict(int)
    turns = layer_turns(graph) if microbatches is None else NO_TURNS
    forward_of = {backward: forward for forward, backward in experts_of(graph).items()}
    for node in graph.nodes:
        option, scope = options[node.index], window_scope(node)
        if node.index in turns.gradients:
            gradients[scope] += gradient_bytes(graph, node, option, mesh, accumulated=None)
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
        end = turns.ends.get(scope, len(graph.nodes))
        read_last = {
            position: storages.read_last.get(Value(node.index, position), 0)
            for position in storages.kept[node.index]
        }
        if is_view_like(node):
            moved = layout_bytes(graph.spec(node.operands[0]), option.operands[0], mesh)
            saved[scope] += moved * num_copies
            late[scope] += moved * num_copies * (max(read_last.values()) > end)
            continue
        for position, last in read_last.items():
            kept = layout_bytes(node.outputs[position], option.outputs[position], mesh)
            saved[scope] += kept * num_copies
            late[scope] += kept * num_copies * (last > end)
    return LayerMemory(
        saved=saved,
        read_late=late,
        again={scope: size // num_graphs for scope, size in again.items()},
        ahead=ahead,
        unreduced=unreduced,
        gradients=gradients,
        layers=turns.layers,
    )
